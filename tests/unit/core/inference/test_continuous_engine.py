"""Requests that run together give what each gives alone, whenever they come and go."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from megatron.core.device import Device
from megatron.core.errors import InputError
from megatron.core.inference import running_batch
from megatron.core.inference.beam_search import BeamConfig
from megatron.core.inference.continuous_engine import ContinuousEngine
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import (
    Continuation,
    GatheredAnswer,
    GenerationRequest,
    NewToken,
    PromptEnded,
    PromptFailed,
    PromptSeen,
    StopRule,
    TokenPairs,
)
from megatron.core.inference.running_batch import NOT_FINITE, Row, SlotCache, choose_for_rows, read_value
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.tensor_parallel.random import RngStreams
from megatron.verification.cells import BASE_FLAGS, FAMILY_SHAPES, SHAPES
from megatron.verification.run_cell import resolve_cell
from tests.unit.core.inference.small_models import build, odd_config, whole_logits

ALONE = describe_parallel_state(0, 1)
GREEDY = SamplingConfig(greedy=True)
REQUESTS = (
    GenerationRequest(prompts=((3, 1, 4), (15, 92, 6, 53, 58)), max_new_tokens=9, sampling=GREEDY),
    GenerationRequest(prompts=((9,),), max_new_tokens=20, sampling=SamplingConfig(temperature=1.7, seed=5)),
    GenerationRequest(prompts=((79, 32, 38, 46, 2, 6, 43, 38),), max_new_tokens=4, log_probabilities=True),
    GenerationRequest(prompts=((3, 1, 4), (9,), (9,)), max_new_tokens=12, sampling=SamplingConfig(top_k=60, top_p=0.9)),
    GenerationRequest(prompts=((7, 8),), max_new_tokens=0, log_probabilities=True),
    GenerationRequest(
        prompts=((5, 5, 5),),
        max_new_tokens=14,
        sampling=SamplingConfig(top_p=0.9, top_p_decay=0.9, no_repeat_ngram_size=2, repetition_penalty=1.3),
        never=TokenPairs(first=frozenset(range(101)), second=frozenset((3, 4, 5))),
        bias=((17, 2.5), (18, -100.0)),
    ),
    GenerationRequest(
        prompts=((11, 12),),
        max_new_tokens=10,
        sampling=SamplingConfig(no_repeat_ngram_size=2, repetition_penalty=1.2),
        beams=BeamConfig(num_beams=3),
    ),
    GenerationRequest(
        prompts=((2, 71), (8,)),
        max_new_tokens=15,
        sampling=SamplingConfig(temperature=2.0, presence_penalty=1.0, frequency_penalty=0.7, seed=9),
        stop=StopRule(end_tokens=frozenset(range(50)), closing_tokens=frozenset(range(50, 60))),
    ),
)


def test_each_row_of_a_batch_has_its_own_token_and_values() -> None:
    """A row that cannot be chosen for has no values; one that asks for none gets none."""
    wants = GenerationRequest(
        prompts=((3, 1), (4, 1), (5, 9)), max_new_tokens=2, sampling=GREEDY, log_probabilities=True
    )
    wants_none = GenerationRequest(prompts=((2, 6),), max_new_tokens=2, sampling=GREEDY)
    rows = [Row(0, wants, prompt, torch.device("cpu")) for prompt in range(3)]
    rows.append(Row(1, wants_none, 0, torch.device("cpu")))
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(1))
    logits[1, 3] = float("nan")
    chosen = choose_for_rows(logits, rows, 9)
    best = logits.argmax(dim=-1)
    assert chosen[:, 0].tolist() == [best[0], NOT_FINITE, best[2], best[3]]
    assert chosen[1, 1:].eq(0).all()
    assert chosen[3, 1:].eq(0).all()
    for row in (0, 2):
        known = logits[row].double().log_softmax(0)
        value = read_value(chosen[row, 1:].tolist(), 2)
        assert value.log_probability == pytest.approx(known.max().item(), rel=1e-6)
        assert [token for token, _ in value.alternatives] == known.topk(2).indices.tolist()
        assert len(read_value(chosen[row, 1:].tolist(), 9).alternatives) == 7


@pytest.fixture(scope="module")
def engine() -> InferenceEngine:
    return InferenceEngine(build(odd_config(), ALONE.tp), ALONE)


def run_together(
    engine: InferenceEngine, requests: Mapping[int, GenerationRequest], max_rows: int, max_tokens: int = 10_000
) -> dict[int, list[Continuation]]:
    """Add each request before the step of its number, and step until all have ended."""
    continuous = ContinuousEngine(engine, max_rows, max_tokens)
    answers = {step: GatheredAnswer(request) for step, request in requests.items()}
    for step in range(1000):
        if step in requests:
            continuous.add(step, requests[step])
        for job, happened in continuous.step():
            answers[job].add(happened)
        if all(answer.is_whole for answer in answers.values()):
            break
    assert all(answer.is_whole for answer in answers.values())
    assert not continuous.is_busy
    return {step: answer.continuations() for step, answer in answers.items()}


def check_equal(found: list[Continuation], expected: list[Continuation]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.log_probabilities == (other.log_probabilities and pytest.approx(other.log_probabilities, abs=1e-12))
        assert [text.tokens for text in one.hypotheses] == [text.tokens for text in other.hypotheses]


@pytest.mark.parametrize(("max_rows", "max_tokens", "pause"), [(16, 10_000, 1), (3, 10_000, 2), (4, 50, 1)])
def test_requests_that_come_one_after_the_other_give_what_each_gives_alone(
    engine: InferenceEngine, max_rows: int, max_tokens: int, pause: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few that the prompts are shown in parts, and some of them together.
    monkeypatch.setattr(running_batch, "_PROMPT_TOKENS_AT_ONCE", 6)
    monkeypatch.setattr(running_batch, "_SCORED_TOKENS_AT_ONCE", 3)
    found = run_together(engine, {pause * n: request for n, request in enumerate(REQUESTS)}, max_rows, max_tokens)
    for number, request in enumerate(REQUESTS):
        check_equal(found[pause * number], engine.generate(request))


@pytest.mark.parametrize("shape", FAMILY_SHAPES)
def test_rows_of_unequal_length_change_no_probability_of_a_family(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running_batch, "_SCORED_TOKENS_AT_ONCE", 4)
    config = resolve_cell((*BASE_FLAGS, *SHAPES[shape]), 1, "float64").model
    model = GPTModel(config, ALONE.tp, RngStreams(Device("cpu"), 1, ALONE.place), seed=3)
    # Longer and shorter than the window of 5.
    prompts = ((1, 2, 3), (5, 6, 7, 8, 9, 10, 11, 12, 13), (4,))
    requests = {
        2 * n: GenerationRequest(prompts=(prompt,), max_new_tokens=10, log_probabilities=True)
        for n, prompt in enumerate(prompts)
    }
    found = run_together(InferenceEngine(model, ALONE), requests, max_rows=4)
    for step, request in requests.items():
        text = torch.tensor([[*request.prompts[0], *found[step][0].tokens]])
        logits = whole_logits(model, text)[:-1, 0, : config.vocab_size]
        expected = logits.log_softmax(dim=-1).gather(1, text[0, 1:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(found[step][0].log_probabilities, dtype=torch.float64), expected)


def test_alternatives_are_the_likeliest_tokens_and_hold_the_chosen_ones_value(engine: InferenceEngine) -> None:
    request = GenerationRequest(
        prompts=((3, 1, 4, 1),), max_new_tokens=2, sampling=GREEDY, log_probabilities=True, num_alternatives=2
    )
    continuous = ContinuousEngine(engine, 4, 1000)
    continuous.add(0, request)
    continuous.add(1, GenerationRequest(prompts=((5,),), max_new_tokens=2, new_log_probabilities=True))
    news = [*continuous.step(), *continuous.step()]
    assert [happened.value.alternatives for job, happened in news if job == 1 and isinstance(happened, NewToken)] == [
        (),
        (),
    ]
    values = [value for job, seen in news if job == 0 and isinstance(seen, PromptSeen) for value in seen.values]
    new = [happened for job, happened in news if job == 0 and isinstance(happened, NewToken)]
    text = torch.tensor([[3, 1, 4, 1, *(each.token for each in new)]])
    known = whole_logits(engine.model, text)[:-1, 0, :101].log_softmax(-1)
    for value, expected, token in zip([*values, *(each.value for each in new)], known, text[0, 1:], strict=True):
        best = expected.topk(2)
        assert [token for token, _ in value.alternatives] == best.indices.tolist()
        assert [number for _, number in value.alternatives] == pytest.approx(best.values.tolist())
        assert value.log_probability == pytest.approx(float(expected[token]))
    # Bit by bit: whoever asks whether a token was the likeliest compares the two numbers.
    assert [each.value.log_probability for each in new] == [each.value.alternatives[0][1] for each in new]


def test_who_leaves_is_gone_at_the_next_step_and_disturbs_nobody(engine: InferenceEngine) -> None:
    expected = engine.generate(REQUESTS[1])
    continuous = ContinuousEngine(engine, 21, 10_000)
    for job in range(20):
        continuous.add(job, GenerationRequest(prompts=((job,),), max_new_tokens=30, sampling=GREEDY))
    for _ in range(5):
        continuous.step()
    assert continuous.num_rows == 20
    continuous.drop(range(20))
    assert continuous.num_rows == 0
    continuous.add(20, REQUESTS[1])
    answer = GatheredAnswer(REQUESTS[1])
    for num_steps in range(1, 100):
        for job, happened in continuous.step():
            assert job == 20
            answer.add(happened)
        if num_steps == 1:
            assert len(answer.continuations()[0].tokens) == 1
        if answer.is_whole:
            break
    check_equal(answer.continuations(), expected)


def test_a_row_that_is_not_finite_fails_alone(engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = engine.staged.forward

    def spoil(tokens: torch.Tensor, *rest: torch.Tensor, **options: bool) -> torch.Tensor | None:
        logits = forward(tokens, *rest, **options)
        logits[:, (tokens == 13).any(dim=1)] = torch.nan
        return logits

    monkeypatch.setattr(engine.staged, "forward", spoil)
    continuous = ContinuousEngine(engine, 4, 1000)
    continuous.add(0, GenerationRequest(prompts=((12, 13),), max_new_tokens=5, sampling=GREEDY))
    continuous.add(1, GenerationRequest(prompts=((12, 14),), max_new_tokens=1, sampling=GREEDY))
    news = continuous.step()
    (failed,) = [happened for job, happened in news if job == 0 and isinstance(happened, PromptFailed)]
    assert isinstance(failed.error, InputError)
    assert "not finite at position 1" in str(failed.error)
    assert len([job for job, happened in news if job == 1 and isinstance(happened, NewToken)]) == 1
    assert not continuous.is_busy


def test_an_engine_is_busy_and_full_as_long_as_something_waits_or_runs(engine: InferenceEngine) -> None:
    request = GenerationRequest(prompts=((5,),), max_new_tokens=3, sampling=GREEDY)
    beams = GenerationRequest(prompts=((5,),), max_new_tokens=3, beams=BeamConfig(num_beams=2))
    continuous = ContinuousEngine(engine, 2, 1000)
    assert (continuous.is_busy, continuous.has_room, continuous.room) == (False, True, 2)
    continuous.add(0, request)
    # It waits for the next step.
    assert (continuous.is_busy, continuous.has_room, continuous.room) == (True, False, 2)
    continuous.step()
    assert (continuous.is_busy, continuous.has_room, continuous.room) == (True, True, 1)
    continuous.add(1, request)
    continuous.step()
    assert (continuous.is_busy, continuous.has_room, continuous.room) == (True, False, 0)
    continuous.drop([0, 1])
    assert (continuous.is_busy, continuous.has_room, continuous.room) == (False, True, 2)
    for job in range(4):
        assert continuous.has_room
        continuous.add(job, beams)
        assert continuous.is_busy
    assert not continuous.has_room
    continuous.drop([2])
    assert continuous.has_room
    continuous.reset()
    assert not continuous.is_busy


def test_why_each_prompt_ends_is_reported(engine: InferenceEngine) -> None:
    (free,) = engine.generate(GenerationRequest(prompts=((3, 1, 4),), max_new_tokens=3, sampling=GREEDY))
    first, second, _ = free.tokens
    rules = (
        StopRule(),
        StopRule(end_tokens=frozenset((second,))),
        StopRule(closing_tokens=frozenset((second,))),
        StopRule(closing_pairs=TokenPairs(first=frozenset((first,)), second=frozenset((second,)))),
    )
    continuous = ContinuousEngine(engine, 5, 1000)
    for job, stop in enumerate(rules):
        continuous.add(job, GenerationRequest(prompts=((3, 1, 4),), max_new_tokens=3, sampling=GREEDY, stop=stop))
    continuous.add(4, GenerationRequest(prompts=((9,), (3, 1)), max_new_tokens=0, log_probabilities=True))
    ends = []
    while continuous.is_busy:
        ends += [(job, happened) for job, happened in continuous.step() if isinstance(happened, PromptEnded)]
    assert sorted(ends, key=lambda end: (end[0], end[1].prompt)) == [
        (0, PromptEnded(0, "length")),
        (1, PromptEnded(0, "stop")),
        (2, PromptEnded(0, "stop")),
        (3, PromptEnded(0, "stop")),
        (4, PromptEnded(0, "length")),
        (4, PromptEnded(1, "length")),
    ]


@pytest.mark.parametrize("is_dropped", [True, False])
def test_a_row_that_is_not_finite_leaves_nothing_to_those_that_follow(
    is_dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its keys and values are in the columns that a mask hides from a shorter row in its slot."""
    monkeypatch.setattr(running_batch, "_PROMPT_TOKENS_AT_ONCE", 8)
    model = build(odd_config(untie_embeddings_and_output_weights=True), ALONE.tp)
    with torch.no_grad():
        model.embedding.word_embeddings.weight[13] = torch.nan
    engine = InferenceEngine(model, ALONE)
    long = GenerationRequest(prompts=(tuple(range(20, 28)),), max_new_tokens=8, sampling=GREEDY)
    short = GenerationRequest(prompts=((4,),), max_new_tokens=8, sampling=GREEDY, log_probabilities=True)
    continuous = ContinuousEngine(engine, 2, 1000)
    answers = {0: GatheredAnswer(long), 2: GatheredAnswer(short)}
    continuous.add(0, long)
    continuous.step()
    # Its prompt is shown whole in two steps, in the first of which nobody sees that it is not finite.
    continuous.add(1, GenerationRequest(prompts=((13,) * 9,), max_new_tokens=5, sampling=GREEDY))
    continuous.step()
    assert continuous.num_rows == 2
    if is_dropped:
        continuous.drop([1])
    else:
        assert [job for job, happened in continuous.step() if isinstance(happened, PromptFailed)] == [1]
    assert continuous.num_rows == 1
    continuous.add(2, short)
    news = []
    while continuous.is_busy:
        news += continuous.step()
    for job, happened in news:
        answers[job].add(happened)
    assert [job for job, happened in news if isinstance(happened, PromptSeen)] == [2], "the other row was running"
    check_equal(answers[2].continuations(), engine.generate(short))


def test_the_cache_of_slots_grows_by_doubling_and_keeps_what_it_has() -> None:
    cache = SlotCache()
    sizes = []
    for num_rows, length in ((1, 3), (2, 64), (3, 65), (5, 65), (5, 129)):
        cache.begin_pass(0, torch.tensor([[length - 1]] * num_rows), length)
        new = torch.full((1, num_rows, 1, 1), float(length))
        key, value = cache.update(0, new, -new)
        assert key.shape == (length, num_rows, 1, 1)
        sizes.append(tuple(cache._buffers[0][0].shape[:2]))
    # A column more than a pass may read.
    assert sizes == [(1, 65), (2, 65), (4, 129), (8, 129), (8, 257)]
    written = [[2, 63, 64, 128], [63, 64, 128], [64, 128], [64, 128], [64, 128]]
    for row, columns in enumerate(written):
        assert key[:, row].flatten().nonzero().flatten().tolist() == columns
        assert torch.equal(key[columns, row].flatten(), torch.tensor(columns) + 1.0)
    assert torch.equal(value, -key)


@pytest.mark.parametrize("num_alternatives", [0, 3])
def test_the_room_for_alternatives_is_that_of_the_widest_row(engine: InferenceEngine, num_alternatives: int) -> None:
    rows = [
        GenerationRequest(
            prompts=((3, 1, 4),), max_new_tokens=1, sampling=GREEDY, log_probabilities=True, num_alternatives=number
        )
        for number in (num_alternatives, 2)
    ]
    continuous = ContinuousEngine(engine, 4, 1000)
    for job, request in enumerate(rows):
        continuous.add(job, request)
    for job, happened in continuous.step():
        wanted = rows[job].num_alternatives
        if isinstance(happened, PromptSeen):
            assert [len(value.alternatives) for value in happened.values] == [wanted] * 2
        elif isinstance(happened, NewToken):
            assert happened.value is not None
            assert len(happened.value.alternatives) == wanted


@pytest.mark.parametrize(("max_new_tokens", "length"), [(0, 3), (1, 3), (5, 7)])
def test_a_row_needs_no_position_for_its_last_token(max_new_tokens: int, length: int) -> None:
    request = GenerationRequest(prompts=((3, 1, 4),), max_new_tokens=max_new_tokens, log_probabilities=True)
    assert Row(0, request, 0, torch.device("cpu")).full_length == length


def test_rows_run_together_within_the_bound_of_their_longest() -> None:
    """Three rows of 4 positions are within 12, two of 7 are not; a row alone always runs."""

    def num_running(max_tokens: int, *sizes: int) -> int:
        engine = InferenceEngine(build(odd_config(), ALONE.tp), ALONE)
        continuous = ContinuousEngine(engine, 3, max_tokens)
        for job, size in enumerate(sizes):
            continuous.add(job, GenerationRequest(prompts=((7,) * (size - 1),), max_new_tokens=2, sampling=GREEDY))
        continuous.step()
        return continuous.num_rows

    assert num_running(12, 4, 4, 4, 4) == 3
    assert num_running(11, 4, 4, 4, 4) == 2
    assert num_running(12, 4, 7, 4) == 1
    assert num_running(14, 4, 7, 4) == 2
    assert num_running(5, 20, 4) == 1


@pytest.mark.parametrize(
    ("lengths", "counts"),
    [
        ([3], [3]),
        ([12], [12]),
        ([13], [12]),
        ([6, 6, 1], [6, 6]),
        ([4, 4, 4], [4, 4, 4]),
        ([5, 7], [5]),
        ([13, 1], [12]),
    ],
)
def test_prompts_are_shown_together_within_a_budget(lengths: list[int], counts: list[int]) -> None:
    requests = [GenerationRequest(prompts=((7,) * length,), max_new_tokens=1) for length in lengths]
    rows = [Row(0, request, 0, torch.device("cpu")) for request in requests]
    assert running_batch._counts_within(rows, 12) == counts


def test_a_row_without_a_token_to_choose_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InferenceEngine(build(odd_config(vocab_size=5, make_vocab_size_divisible_by=1), ALONE.tp), ALONE)
    used_up = SamplingConfig(no_repeat_ngram_size=1)
    continuous = ContinuousEngine(engine, 4, 1000)
    continuous.add(0, GenerationRequest(prompts=((1, 2, 3, 4, 0),), max_new_tokens=4, sampling=used_up))
    continuous.add(1, GenerationRequest(prompts=((1, 2, 3, 4),), max_new_tokens=1, sampling=used_up))
    news = continuous.step()
    (failed,) = [happened for job, happened in news if job == 0 and isinstance(happened, PromptFailed)]
    assert str(failed.error).startswith("no_repeat_ngram_size 1 excludes every token at position 1")
    assert [happened.token for job, happened in news if job == 1 and isinstance(happened, NewToken)] == [0]

    def fail(*given: object) -> torch.Tensor:
        raise RuntimeError("probability tensor contains inf")

    monkeypatch.setattr(running_batch, "choose_tokens", fail)
    continuous.add(2, GenerationRequest(prompts=((1, 2),), max_new_tokens=4))
    (failed,) = [happened for _, happened in continuous.step() if isinstance(happened, PromptFailed)]
    assert str(failed.error) == "no token can be selected at position 1"
    assert not continuous.is_busy
