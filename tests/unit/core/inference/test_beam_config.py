"""Which beams can be, and what a request may not ask for beside them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron.core.errors import InputError
from megatron.core.inference.beam_search import BeamConfig
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import GenerationRequest, StopRule, TokenPairs, check_request
from megatron.core.inference.sampling import repeating_tokens
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_state import describe_parallel_state
from tests.unit.core.inference.small_models import build, odd_config

STATE = describe_parallel_state(0, 1)
END = StopRule(end_tokens=frozenset((3,)))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"beams": BeamConfig(num_beams=0)}, "num_beams 0 cannot be: 101 of the model's tokens .* use 1..101"),
        ({"beams": BeamConfig(num_beams=101), "stop": END}, "num_beams 101 cannot be: 100 .* use 1..100"),
        ({"beams": BeamConfig(num_beams=2, length_penalty=float("nan"))}, "length_penalty nan is not finite"),
        ({"beams": BeamConfig(num_beams=2, early_stopping="soon")}, "early_stopping 'soon' is not"),  # type: ignore[arg-type]
        ({"sampling": SamplingConfig(top_k=3)}, "beams draw nothing: leave out temperature, top_k and top_p"),
        ({"log_probabilities": True}, "beams give scores in place of log-probabilities"),
        ({"new_log_probabilities": True}, "beams give scores in place of log-probabilities"),
        ({"bias": ((3, 1.0),)}, "beams take no bias of tokens"),
        ({"stop": StopRule(closing_tokens=frozenset((3,)))}, "beams end at an end token alone"),
        ({"stop": StopRule(closing_pairs=TokenPairs(first=frozenset((3,))))}, "beams end at an end token alone"),
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
        {"beams": BeamConfig(num_beams=100, length_penalty=32.0), "stop": END},
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
        with pytest.raises(InputError, match=rf"a bias of token {token}, and the model knows 0\.\.100"):
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
    with pytest.raises(InputError, match=r"no_repeat_ngram_size 1 leaves no (token|text) to choose"):
        engine.generate(request)


def test_drawn_texts_repeat_no_run_of_tokens() -> None:
    engine = InferenceEngine(build(odd_config(), STATE.tp), STATE)
    sampling = SamplingConfig(top_k=2, no_repeat_ngram_size=2)
    request = GenerationRequest(prompts=((7,), (8, 9)), max_new_tokens=25, sampling=sampling)
    for prompt, continuation in zip(request.prompts, engine.generate(request), strict=True):
        text = [*prompt, *continuation.tokens]
        pairs = list(itertools.pairwise(text))
        assert len(set(pairs)) == len(pairs)
