"""Beam search: which beams can be, which continue and are kept, and when the search ends."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron.core.errors import InputError
from megatron.core.inference.beam_search import IMPOSSIBLE, BeamConfig, BeamSearch, Candidate, Hypothesis
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import GenerationRequest, StopRule, TokenPairs, check_request
from megatron.core.inference.sampling import repeating_tokens
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_state import describe_parallel_state
from tests.unit.core.inference.small_models import build, odd_config

END = 9


def search(max_new_tokens: int = 4, num_end_tokens: int = 1, **options: object) -> BeamSearch:
    ends = frozenset(range(END, END + num_end_tokens))
    return BeamSearch(BeamConfig(**({"num_beams": 2} | options)), max_new_tokens, ends)  # type: ignore[arg-type]


def advance(beams: BeamSearch, *candidates: tuple[int, int, float]) -> list[int]:
    return beams.advance([Candidate(*each) for each in candidates])


@pytest.mark.parametrize(("num_end_tokens", "expected"), [(0, 4), (1, 4), (2, 6)])
def test_a_step_needs_candidates_for_the_texts_that_end(num_end_tokens: int, expected: int) -> None:
    assert search(num_end_tokens=num_end_tokens).num_candidates() == expected


def test_texts_go_on_from_the_likeliest_candidates_that_do_not_end() -> None:
    beams = search()
    assert (beams.texts, beams.scores) == ([(), ()], [0.0, IMPOSSIBLE])
    assert advance(beams, (0, 5, -1.0), (0, END, -1.5), (0, 6, -2.0), (0, 7, -3.0)) == [0, 0]
    assert (beams.texts, beams.scores) == ([(5,), (6,)], [-1.0, -2.0])
    assert advance(beams, (1, 3, -2.5), (1, 4, -2.75), (0, 3, -4.0), (0, 4, -5.0)) == [1, 1]
    assert (beams.texts, beams.scores) == ([(6, 3), (6, 4)], [-2.5, -2.75])


def test_a_text_that_ends_counts_among_the_likeliest_alone() -> None:
    beams = search(length_penalty=1.0)
    # The end is the third candidate of a search for two texts.
    advance(beams, (0, 5, -1.0), (0, 6, -2.0), (0, END, -2.5), (0, 7, -3.0))
    assert beams.finished == []
    advance(beams, (0, 5, -1.5), (0, END, -3.0), (1, 7, -4.0), (1, 8, -5.0))
    assert beams.finished == [Hypothesis((5,), -1.5, END)]


def test_a_row_without_a_text_ends_nothing() -> None:
    beams = search()
    advance(beams, (1, END, IMPOSSIBLE - 1.0), (0, 5, IMPOSSIBLE / 10), (0, 6, -2e9), (0, 7, -3e9))
    assert beams.finished == []
    assert not beams.is_done
    beams = search(max_new_tokens=1)
    advance(beams, (0, 5, -1.0), (1, 5, IMPOSSIBLE / 10), (1, 6, -2e9), (1, 7, -3e9))
    assert [text.tokens for text in beams.finished] == [(5,)]


def test_the_best_finished_texts_are_kept_by_their_score() -> None:
    beams = search(length_penalty=2.0, early_stopping="never")
    advance(beams, (0, END, -1.0), (0, 5, -1.5), (0, 6, -2.0), (0, 7, -3.0))
    advance(beams, (0, END, -2.0), (1, 5, -2.5), (1, 6, -2.75), (0, 7, -3.0))
    # The longer text has the better score.
    assert beams.finished == [Hypothesis((5,), -0.5, END), Hypothesis((), -1.0, END)]
    advance(beams, (1, END, -2.25), (0, 5, -3.0), (1, 6, -3.5), (0, 7, -4.0))
    assert beams.finished == [Hypothesis((6, 6), -0.25, END), Hypothesis((5,), -0.5, END)]


def test_texts_of_full_length_are_finished_without_an_end() -> None:
    beams = search(max_new_tokens=2)
    advance(beams, (0, 5, -1.0), (0, 6, -2.0), (0, 7, -3.0), (0, 8, -4.0))
    assert not beams.is_done
    assert advance(beams, (1, 3, -3.0), (0, END, -4.0), (0, 4, -5.0), (0, 5, -6.0)) == [0, 1]
    assert beams.is_done
    assert beams.finished == [Hypothesis((6, 3), -1.5, None), Hypothesis((5,), -2.0, END)]


@pytest.mark.parametrize(
    ("early_stopping", "length_penalty", "next_score", "is_done"),
    [
        (True, 1.0, -1.0, True),
        # At the present length of 2: -5 / 2 is no better than the -2.5 of the second text, -4 / 2 is.
        (False, 1.0, -5.0, True),
        (False, 1.0, -4.0, False),
        # At the full length of 4.
        ("never", 1.0, -5.0, False),
        ("never", 1.0, -10.0, True),
        # Longer texts have no better score.
        ("never", 0.0, -5.0, True),
        ("never", 0.0, -4.5, False),
        ("never", -1.0, -5.0, True),
        ("never", -1.0, -4.0, False),
    ],
)
def test_a_search_ends_when_nothing_better_can_come(
    early_stopping: bool | str, length_penalty: float, next_score: float, is_done: bool
) -> None:
    beams = search(early_stopping=early_stopping, length_penalty=length_penalty)
    advance(beams, (0, 5, -0.5), (0, 6, -0.75), (0, 7, -3.0), (0, 8, -4.0))
    advance(beams, (0, END, -4.0), (1, END, -5.0), (0, 3, next_score), (0, 4, -20.0))
    assert len(beams.finished) == 2
    assert beams.is_done is is_done


def test_a_search_with_fewer_finished_texts_goes_on() -> None:
    beams = search(early_stopping=True)
    advance(beams, (0, END, -0.5), (0, 6, -0.75), (0, 7, -3.0), (0, 8, -4.0))
    assert len(beams.finished) == 1
    assert not beams.is_done


def test_a_search_that_has_ended_keeps_what_it_found() -> None:
    beams = search(early_stopping=True)
    advance(beams, (0, END, -1.0), (0, END, -1.5), (0, 7, -3.0), (0, 8, -4.0))
    found = list(beams.finished)
    assert beams.is_done
    advance(beams, (0, END, -0.1), (1, END, -0.2), (0, 7, -3.0), (0, 8, -4.0))
    assert beams.finished == found
    assert beams.is_done


STATE = describe_parallel_state(0, 1)
BEAM_END = StopRule(end_tokens=frozenset((3,)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beams": BeamConfig(num_beams=0)}, "num_beams 0 .* 101 of the model's tokens .* use 1..101"),
        ({"beams": BeamConfig(num_beams=101), "stop": BEAM_END}, "num_beams 101 is too large: only 100 .* use 1..100"),
        ({"beams": BeamConfig(num_beams=2, length_penalty=float("nan"))}, "length_penalty nan is not finite"),
        ({"beams": BeamConfig(num_beams=2, early_stopping="soon")}, "early_stopping 'soon' is not"),  # type: ignore[arg-type]
        ({"sampling": SamplingConfig(top_k=3)}, "beam search does not sample: omit temperature, top_k and top_p"),
        ({"log_probabilities": True}, "beam search returns scores instead of log-probabilities"),
        ({"new_log_probabilities": True}, "beam search returns scores instead of log-probabilities"),
        ({"bias": ((3, 1.0),)}, "beam search does not support a logit bias"),
        ({"stop": StopRule(closing_tokens=frozenset((3,)))}, "beam search ends only at an end token"),
        ({"stop": StopRule(closing_pairs=TokenPairs(first=frozenset((3,))))}, "beam search ends only at an end token"),
        ({"beams": BeamConfig(num_beams=2, length_penalty=32.5)}, "length_penalty 32.5 is not between -32 and 32"),
        ({"sampling": SamplingConfig(no_repeat_ngram_size=-1)}, "--no-repeat-ngram-size -1 is negative"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(fields: dict[str, Any], message: str) -> None:
    request = GenerationRequest(
        **{"prompts": ((1, 2),), "max_new_tokens": 4, "beams": BeamConfig(num_beams=2)} | fields
    )
    with pytest.raises(InputError, match=message) as caught:
        check_request(odd_config(), request)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"beams": BeamConfig(num_beams=1)},
        {"beams": BeamConfig(num_beams=100, length_penalty=32.0), "stop": BEAM_END},
        {"beams": BeamConfig(num_beams=2, length_penalty=-32.0, early_stopping=True)},
        {"sampling": SamplingConfig(no_repeat_ngram_size=2, repetition_penalty=1.5, seed=3, greedy=True)},
    ],
)
def test_beams_that_can_be(fields: dict[str, Any]) -> None:
    beams = {"beams": BeamConfig(num_beams=2, early_stopping="never")}
    check_request(odd_config(), GenerationRequest(**{"prompts": ((0, 100),), "max_new_tokens": 1} | beams | fields))


def test_a_bias_is_of_a_token_that_the_model_knows() -> None:
    def check(token: int) -> None:
        check_request(odd_config(), GenerationRequest(prompts=((1,),), max_new_tokens=1, bias=((token, 1.0),)))

    check(0)
    check(100)
    for token in (-1, 101):
        with pytest.raises(
            InputError,
            match=rf"the logit bias contains token {token}, which is outside the model's vocabulary 0\.\.100",
        ):
            check(token)


def test_a_token_repeats_what_stood_behind_the_same_tokens() -> None:
    text = [1, 2, 3, 1, 2, 5, 1, 2]
    assert repeating_tokens(text, 1) == [1, 2, 3, 5]
    assert repeating_tokens(text, 2) == [3, 5]
    assert repeating_tokens(text, 3) == [3, 5]
    assert repeating_tokens(text, 4) == []
    assert repeating_tokens([1, 1], 4) == []


@pytest.mark.parametrize("beams", [None, BeamConfig(num_beams=2)])
def test_a_vocabulary_that_is_used_up_is_an_error_in_the_input(beams: BeamConfig | None) -> None:
    engine = InferenceEngine(build(odd_config(vocab_size=5, make_vocab_size_divisible_by=1), STATE.tp), STATE)
    sampling = SamplingConfig(no_repeat_ngram_size=1)
    request = GenerationRequest(prompts=((1, 2),), max_new_tokens=4, sampling=sampling, beams=beams)
    with pytest.raises(InputError, match=r"no_repeat_ngram_size 1 excludes every (token|continuation)"):
        engine.generate(request)


def test_drawn_texts_repeat_no_run_of_tokens() -> None:
    engine = InferenceEngine(build(odd_config(), STATE.tp), STATE)
    sampling = SamplingConfig(top_k=2, no_repeat_ngram_size=2)
    request = GenerationRequest(prompts=((7,), (8, 9)), max_new_tokens=25, sampling=sampling)
    for prompt, continuation in zip(request.prompts, engine.generate(request), strict=True):
        text = [*prompt, *continuation.tokens]
        pairs = list(itertools.pairwise(text))
        assert len(set(pairs)) == len(pairs)
