"""The engine: prompts, padding, cached continuations and scores are those of whole forward passes."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.core.device import Device
from megatron.core.errors import ConfigurationError, InputError
from megatron.core.inference import engine, prompt_batch
from megatron.core.inference.beam_search import BeamConfig
from megatron.core.inference.continuous_engine import ContinuousEngine
from megatron.core.inference.engine import InferenceEngine, generate
from megatron.core.inference.inference_request import (
    GenerationCancelled,
    GenerationRequest,
    StopRule,
    TokenPairs,
    context_length,
)
from megatron.core.inference.prompt_batch import ScoredRow, batches_of_like_length, gather_logits, pad_left
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.inference.staged_model import StagedModel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.attention_pattern import CAUSAL
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.process_group import single_rank_group
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.verification.cells import BASE_FLAGS, FAMILY_SHAPES, SHAPES
from megatron.verification.model_cells import ATTENTION_SHAPES, LATENT_SHAPES, SPARSE_SHAPES
from megatron.verification.run_cell import resolve_cell
from tests.unit.core.inference.small_models import build, golden_model, odd_config, whole_logits

STATE = describe_parallel_state(0, 1)
GREEDY = SamplingConfig(greedy=True)
DRAWN = SamplingConfig(temperature=1.3, top_k=60, top_p=0.97, seed=5)
UNEQUAL_PROMPTS = [[3, 1, 4], [15, 92, 6, 53, 58], [9], [79, 32, 38], [46, 26, 43, 38, 32, 79, 50, 2]]


def make_model(name: str) -> GPTModel:
    if name == "odd":
        return build(odd_config(), single_rank_group())
    if name == "alibi":
        return build(odd_config(position_embedding_type="alibi"), single_rank_group())
    return golden_model(name, single_rank_group())


def greedy_without_cache(model: GPTModel, prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        logits = whole_logits(model, torch.tensor([tokens]))[-1, 0, : model.config.vocab_size]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("chunks", [(1,) * 13, (6, 1, 1, 1, 1, 1, 1, 1), (4, 5, 1, 3)])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen", "odd", "alibi"])
def test_cached_logits_are_those_of_a_whole_forward_pass(name: str, chunks: tuple[int, ...]) -> None:
    model = make_model(name)
    tokens = torch.randint(0, 101, (3, sum(chunks)), generator=torch.Generator().manual_seed(1))
    expected = whole_logits(model, tokens)
    cache = KeyValueCache(tokens.shape[1])
    start = 0
    for length in chunks:
        positions = torch.arange(start, start + length).expand(3, -1)
        with torch.no_grad():
            logits = model(tokens[:, start : start + length], positions, cache=cache)
        torch.testing.assert_close(logits, expected[start : start + length], rtol=1e-11, atol=1e-11)
        start += length


def test_the_plain_attention_agrees_with_a_cache() -> None:
    config = odd_config(attention_backend="unfused")
    plain = generate(build(config, single_rank_group()), UNEQUAL_PROMPTS, 9, GREEDY, None, STATE)
    fused = generate(build(odd_config(), single_rank_group()), UNEQUAL_PROMPTS, 9, GREEDY, None, STATE)
    assert plain == fused


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen", "odd", "alibi"])
def test_greedy_generation_equals_repeated_whole_forward_passes(name: str) -> None:
    model = make_model(name)
    results = generate(model, UNEQUAL_PROMPTS, 12, GREEDY, None, STATE)
    assert results == [greedy_without_cache(model, prompt, 12) for prompt in UNEQUAL_PROMPTS]
    assert len({tuple(result) for result in results}) > 1


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_generation_is_deterministic(sampling: SamplingConfig) -> None:
    model = make_model("odd")
    assert generate(model, UNEQUAL_PROMPTS, 10, sampling, None, STATE) == generate(
        model, UNEQUAL_PROMPTS, 10, sampling, None, STATE
    )


def test_another_seed_draws_another_text() -> None:
    model = make_model("odd")
    other = dataclasses.replace(DRAWN, seed=6)
    assert generate(model, UNEQUAL_PROMPTS, 10, DRAWN, None, STATE) != generate(
        model, UNEQUAL_PROMPTS, 10, other, None, STATE
    )


def test_prompts_of_unequal_length_give_what_each_gives_alone() -> None:
    model = make_model("odd")
    together = generate(model, UNEQUAL_PROMPTS, 11, GREEDY, None, STATE)
    assert together == [generate(model, [prompt], 11, GREEDY, None, STATE)[0] for prompt in UNEQUAL_PROMPTS]


def test_draws_do_not_depend_on_the_prompts_beside() -> None:
    """The third prompt stays the third; the others get other lengths, so that it runs in another batch."""
    model = make_model("odd")
    neighbors = [[7, 7], [8], [9], [11], [12]]
    results = [generate(model, prompts, 11, DRAWN, None, STATE) for prompts in (UNEQUAL_PROMPTS, neighbors)]
    assert results[0][2] == results[1][2]


def test_equal_prompts_draw_different_texts() -> None:
    results = generate(make_model("odd"), [[5, 6]] * 3, 12, DRAWN, None, STATE)
    assert len({tuple(result) for result in results}) == 3


@pytest.mark.parametrize("max_batch_size", [1, 2, 3])
def test_the_batch_size_changes_nothing(max_batch_size: int) -> None:
    model = make_model("odd")
    prompts = [[3, 1], [4, 1], [5, 9], [2, 6], [5]]
    whole = generate(model, prompts, 6, DRAWN, None, STATE)
    assert generate(model, prompts, 6, DRAWN, None, STATE, max_batch_size=max_batch_size) == whole


def test_generation_stops_at_the_end_of_document() -> None:
    model = make_model("odd")
    free = generate(model, UNEQUAL_PROMPTS, 12, GREEDY, None, STATE)
    eod_id = free[0][4]
    stopped = generate(model, UNEQUAL_PROMPTS, 12, GREEDY, eod_id, STATE)
    expected = [result[: result.index(eod_id)] if eod_id in result else result for result in free]
    assert stopped == expected
    assert len(stopped[0]) <= 4
    assert any(len(result) == 12 for result in stopped), "the test needs a prompt that goes on"


def test_tokens_are_given_out_as_they_are_known() -> None:
    model = make_model("odd")
    seen: list[tuple[int, int]] = []
    prompts = [[3, 1], [4, 1], [5]]
    results = generate(model, prompts, 5, GREEDY, None, STATE, on_token=lambda *pair: seen.append(pair))
    assert [[token for number, token in seen if number == prompt] for prompt in range(3)] == results
    assert [number for number, _ in seen] == [0, 1, 2] * 5


def test_padded_columns_are_never_chosen() -> None:
    """Padding has the logit 0 where every real token has less."""
    logits = torch.full((2, 104), -1.0)
    logits[:, 101:] = 0.0
    assert gather_logits(logits, 101, single_rank_group()).shape == (2, 101)
    model = make_model("odd")
    assert model.output_weight.shape[0] == 104
    with torch.no_grad():
        model.output_weight[101:] = 100.0 * model.output_weight[:3]
    results = generate(model, UNEQUAL_PROMPTS, 9, dataclasses.replace(DRAWN, temperature=50.0, top_k=0), None, STATE)
    assert max(token for result in results for token in result) < 101


def test_learned_positions_can_be_used_to_the_last() -> None:
    model = make_model("odd")
    prompt = [1] * 30
    assert generate(model, [prompt], 7, GREEDY, None, STATE) == [greedy_without_cache(model, prompt, 7)]


def test_more_tokens_than_learned_positions_are_refused() -> None:
    with pytest.raises(InputError) as caught:
        generate(make_model("odd"), [[2], [1] * 30], 8, GREEDY, None, STATE)
    message = str(caught.value)
    assert message.startswith(
        "prompt 2 of 2 has 30 tokens; with 8 tokens to generate the length is 38, but the model has 37"
    )


def test_rotary_positions_go_on() -> None:
    model = golden_model("llama", single_rank_group())
    (result,) = generate(model, [[1] * 30], 12, GREEDY, None, STATE)
    assert result == greedy_without_cache(model, [1] * 30, 12)


@pytest.mark.parametrize(
    ("prompts", "count", "message"),
    [
        ([[1], []], 3, "prompt 2 of 2 has no tokens"),
        ([[1, 101]], 3, "prompt 1 of 1 contains token 101, which is outside the model's vocabulary 0..100"),
        ([[-1]], 3, "prompt 1 of 1 contains token -1"),
        ([[1]], 0, "0 tokens to generate is not positive"),
        ([[1]], -1, "-1 tokens to generate is not positive"),
    ],
)
def test_requests_that_cannot_be_are_refused(prompts: list[list[int]], count: int, message: str) -> None:
    with pytest.raises(InputError) as caught:
        generate(make_model("odd"), prompts, count, GREEDY, None, STATE)
    assert str(caught.value).startswith(message)


def test_sampling_that_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--top-k -1"):
        generate(make_model("odd"), [[1]], 3, SamplingConfig(top_k=-1), None, STATE)


def test_a_model_with_sequence_parallelism_is_refused() -> None:
    model = build(odd_config(sequence_parallel=True), single_rank_group())
    with pytest.raises(ConfigurationError, match="sequence_parallel=False"):
        generate(model, [[1]], 3, GREEDY, None, STATE)


@pytest.mark.parametrize("sizes", [ParallelSizes(), ParallelSizes(cp=2)])
def test_data_and_context_parallel_ranks_are_rejected(sizes: ParallelSizes) -> None:
    with pytest.raises(ConfigurationError, match="generation supports only tensor and pipeline parallelism"):
        generate(make_model("odd"), [[1]], 3, GREEDY, None, describe_parallel_state(0, 2, sizes))


def test_pipeline_ranks_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"pipeline\(2\)"):
        generate(make_model("odd"), [[1]], 3, GREEDY, None, describe_parallel_state(0, 2, ParallelSizes(pp=2)))


def test_weights_that_are_not_finite_are_reported() -> None:
    model = make_model("odd")
    with torch.no_grad():
        model.output_weight[17] = torch.nan
    with pytest.raises(InputError, match="not finite at position 1"):
        generate(model, [[1, 2]], 3, GREEDY, None, STATE)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was(training: bool) -> None:
    model = build(odd_config(), single_rank_group()).train(training)
    before = [parameter.clone() for parameter in model.parameters()]
    generate(model, [[1, 2]], 3, DRAWN, None, STATE)
    assert model.training is training
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters()))
    assert all(parameter.requires_grad and not parameter.is_inference() for parameter in model.parameters())


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_low_precision_models_generate(dtype: str) -> None:
    model = build(odd_config(params_dtype=dtype), single_rank_group())
    results = generate(model, UNEQUAL_PROMPTS, 6, DRAWN, None, STATE)
    assert [len(result) for result in results] == [6] * 5


def request(**values: object) -> GenerationRequest:
    defaults: dict[str, object] = {
        "prompts": tuple(map(tuple, UNEQUAL_PROMPTS)),
        "max_new_tokens": 9,
        "sampling": GREEDY,
    }
    return GenerationRequest(**(defaults | values))  # type: ignore[arg-type]


def whole_log_probabilities(model: GPTModel, tokens: list[int]) -> torch.Tensor:
    """Without a cache, padding or neighbors; one number for every token but the first."""
    logits = whole_logits(model, torch.tensor([tokens]))[:, 0, : model.config.vocab_size]
    return logits.log_softmax(-1)[:-1].gather(1, torch.tensor(tokens[1:])[:, None]).squeeze(1)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen", "odd", "alibi"])
def test_log_probabilities_are_those_of_a_whole_forward_pass(name: str, sampling: SamplingConfig) -> None:
    model = make_model(name)
    asked = request(sampling=sampling, log_probabilities=True)
    results = InferenceEngine(model, STATE).generate(asked)
    for prompt, result in zip(asked.prompts, results, strict=True):
        expected = whole_log_probabilities(model, [*prompt, *result.tokens])
        assert result.log_probabilities is not None
        torch.testing.assert_close(
            torch.tensor(result.log_probabilities, dtype=torch.float64), expected, rtol=1e-11, atol=1e-11
        )


def test_the_context_is_as_long_as_the_positions_and_the_limit_allow() -> None:
    assert [context_length(odd_config(), most) for most in (36, 37, 38)] == [36, 37, 37]
    rotary = odd_config(position_embedding_type="rope", max_position_embeddings=0)
    assert context_length(rotary, 1000) == 1000


def test_tokens_of_a_beam_search_are_given_out_when_it_ends() -> None:
    seen: list[tuple[int, int]] = []
    asked = request(prompts=((3, 1), (4, 1, 5)), beams=BeamConfig(num_beams=2), sampling=SamplingConfig())
    results = InferenceEngine(make_model("odd"), STATE).generate(asked, on_token=lambda *pair: seen.append(pair))
    assert seen == [(number, token) for number, result in enumerate(results) for token in result.tokens]


def test_log_probabilities_change_no_text_and_are_not_given_unasked() -> None:
    engine = InferenceEngine(make_model("odd"), STATE)
    without = engine.generate(request(sampling=DRAWN))
    with_them = engine.generate(request(sampling=DRAWN, log_probabilities=True))
    assert [result.tokens for result in without] == [result.tokens for result in with_them]
    assert {result.log_probabilities for result in without} == {None}


def test_prompts_alone_can_be_scored() -> None:
    model = make_model("odd")
    results = InferenceEngine(model, STATE).generate(request(max_new_tokens=0, log_probabilities=True))
    for prompt, result in zip(UNEQUAL_PROMPTS, results, strict=True):
        assert result.tokens == []
        expected = whole_log_probabilities(model, prompt).tolist()
        assert result.log_probabilities == pytest.approx(expected, rel=1e-11)
    assert results[2].log_probabilities == []


@pytest.mark.parametrize("at_once", [1, 7, 13])
def test_prompts_that_are_shown_bit_by_bit_give_the_same(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InferenceEngine(make_model("llama"), STATE, max_batch_size=3)
    asked = request(sampling=DRAWN, log_probabilities=True)
    whole = engine.generate(asked)
    monkeypatch.setattr("megatron.core.inference.prompt_batch._PROMPT_TOKENS_AT_ONCE", at_once)
    for result, expected in zip(engine.generate(asked), whole, strict=True):
        assert result.tokens == expected.tokens
        assert result.log_probabilities == pytest.approx(expected.log_probabilities, rel=1e-10)


def test_a_closing_token_is_the_last_one() -> None:
    engine = InferenceEngine(make_model("odd"), STATE)
    free = [result.tokens for result in engine.generate(request())]
    closing = free[0][3]
    results = engine.generate(request(stop=StopRule(closing_tokens=frozenset((closing,))), log_probabilities=True))
    expected = [tokens[: tokens.index(closing) + 1] if closing in tokens else tokens for tokens in free]
    assert [result.tokens for result in results] == expected
    assert expected != free
    for prompt, result in zip(UNEQUAL_PROMPTS, results, strict=True):
        assert len(result.log_probabilities or ()) == len(prompt) - 1 + len(result.tokens)


def test_a_closing_pair_may_begin_in_the_prompt() -> None:
    engine = InferenceEngine(make_model("odd"), STATE)
    free = [result.tokens for result in engine.generate(request())]
    pair = TokenPairs(first=frozenset((UNEQUAL_PROMPTS[1][-1],)), second=frozenset((free[1][0],)))
    stopped = engine.generate(request(stop=StopRule(closing_pairs=pair)))
    assert stopped[1].tokens == free[1][:1]
    assert stopped[4].tokens == free[4]


def test_a_token_that_may_not_follow_is_not_chosen() -> None:
    engine = InferenceEngine(make_model("odd"), STATE)
    free = [result.tokens for result in engine.generate(request())]
    never = TokenPairs(first=frozenset((UNEQUAL_PROMPTS[1][-1],)), second=frozenset((free[1][0],)))
    results = [result.tokens for result in engine.generate(request(never=never))]
    assert results[1][0] != free[1][0]
    assert results[0] == free[0]


def test_generation_can_be_given_up_between_two_tokens() -> None:
    seen: list[int] = []
    engine = InferenceEngine(make_model("odd"), STATE)
    with pytest.raises(GenerationCancelled):
        engine.generate(
            request(), on_token=lambda number, token: seen.append(token), is_cancelled=lambda: len(seen) >= 10
        )
    assert len(seen) == 10
    assert len(engine.generate(request())[0].tokens) == 9


def test_a_decaying_top_p_ends_with_the_likeliest_tokens() -> None:
    engine = InferenceEngine(make_model("odd"), STATE)
    sampling = SamplingConfig(temperature=3.0, top_p=1.0, top_p_decay=1e-9)
    (result,) = engine.generate(request(prompts=((3, 1),), sampling=sampling, max_new_tokens=8))
    assert result.tokens[1:] == greedy_without_cache(engine.model, [3, 1, result.tokens[0]], 7)


def test_a_prompt_that_is_not_finite_is_named_among_others() -> None:
    """The position counts the prompt's own tokens, not the padding."""
    model = make_model("odd")
    with torch.no_grad():
        model.output_weight[17] = torch.nan
    with pytest.raises(InputError, match="not finite at position 2"):
        generate(model, [[1, 2, 3], [4], [5, 6]], 3, GREEDY, None, STATE)
    with pytest.raises(InputError, match="not finite at position 2"):
        InferenceEngine(model, STATE).generate(request(prompts=((1, 2, 3), (4,)), beams=BeamConfig(num_beams=3)))


def test_no_prompts_give_no_texts() -> None:
    assert generate(make_model("odd"), [], 3, GREEDY, None, STATE) == []


@pytest.mark.parametrize("beams", [None, BeamConfig(num_beams=2)])
@pytest.mark.parametrize("token", [0, 1, 2, 3, 4])
def test_the_first_tokens_of_the_vocabulary_can_be_chosen(token: int, beams: BeamConfig | None) -> None:
    model = build(odd_config(position_embedding_type="none"), single_rank_group())
    with torch.no_grad():
        # The hidden states of the prompt's only token become those of the wanted one.
        hidden = model.decoder(model.embedding(torch.tensor([[7]]), None), CAUSAL, None).hidden
        model.embedding.word_embeddings.weight[token] = 100.0 * hidden[0, 0]
    (result,) = InferenceEngine(model, STATE).generate(request(prompts=((7,),), max_new_tokens=1, beams=beams))
    assert result.tokens == [token]


@pytest.mark.parametrize(("beams", "position"), [(None, 4), (BeamConfig(num_beams=2), 4)])
def test_a_later_token_that_is_not_finite_is_named_by_its_position(
    beams: BeamConfig | None, position: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a prompt of two tokens, the third token that is generated is at position 4."""
    engine = InferenceEngine(make_model("odd"), STATE)
    forward = engine.staged.forward
    calls = 0

    def spoil(*arguments: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        logits = forward(*arguments, **options)
        assert logits is not None
        return logits if calls < 4 else logits * torch.nan

    monkeypatch.setattr(engine.staged, "forward", spoil)
    with pytest.raises(InputError, match=f"not finite at position {position}:"):
        engine.generate(request(prompts=((3, 1),), beams=beams, sampling=SamplingConfig(greedy=beams is None)))


def test_no_more_rows_than_the_batch_size_run_together(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = InferenceEngine(make_model("odd"), STATE, max_batch_size=4)
    forward = engine.staged.forward
    sizes: set[int] = set()

    def observe(tokens: torch.Tensor, *rest: Any, **options: Any) -> torch.Tensor | None:
        sizes.add(tokens.shape[0])
        return forward(tokens, *rest, **options)

    monkeypatch.setattr(engine.staged, "forward", observe)
    engine.generate(request(max_new_tokens=2))
    assert sizes == {4, 1}
    sizes.clear()
    # A prompt is shown once, and is then as many rows as there are beams.
    engine.generate(request(max_new_tokens=2, beams=BeamConfig(num_beams=2)))
    assert sizes == {2, 4, 1}
    sizes.clear()
    engine.generate(request(max_new_tokens=2, beams=BeamConfig(num_beams=5)))
    assert sizes == {1, 5}
    sizes.clear()
    continuous = ContinuousEngine(engine, 4, 1000)
    continuous.add(0, request(max_new_tokens=2, beams=BeamConfig(num_beams=2)))
    continuous.add(1, request(max_new_tokens=2, beams=BeamConfig(num_beams=5)))
    while continuous.is_busy:
        continuous.step()
    assert sizes == {1, 2, 4, 5}


def test_nothing_that_was_sent_is_left_on_its_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call waits for its messages to the next stage, also one that is given up."""
    engine = InferenceEngine(make_model("odd"), STATE)
    num_waits = 0

    def finish() -> None:
        nonlocal num_waits
        num_waits += 1

    monkeypatch.setattr(engine.staged, "finish", finish)
    engine.generate(request(prompts=((3, 1),)))
    assert num_waits == 1
    engine.generate(request(prompts=((3, 1),), beams=BeamConfig(num_beams=2), max_new_tokens=2))
    assert num_waits == 2
    engine.score([ScoredRow((3, 1), 1)])
    assert num_waits == 3
    with pytest.raises(GenerationCancelled):
        engine.generate(request(), is_cancelled=lambda: True)
    assert num_waits == 4
    continuous = ContinuousEngine(engine, 4, 1000)
    continuous.add(0, request(prompts=((3, 1),)))
    continuous.step()
    assert num_waits == 5


def test_a_pair_is_of_two_tokens_that_follow_each_other() -> None:
    pairs = TokenPairs(first=frozenset((1, 2)), second=frozenset((2, 3)))
    assert pairs.contain(1, 2)
    assert pairs.contain(2, 2)
    assert not pairs.contain(1, 1)
    assert not pairs.contain(3, 3)
    rule = StopRule(closing_tokens=frozenset((7,)), closing_pairs=pairs)
    assert rule.closes(1, 7)
    assert rule.closes(1, 3)
    assert not rule.closes(7, 3)


def test_a_negative_number_of_tokens_is_rejected_if_the_prompt_is_scored() -> None:
    with pytest.raises(InputError, match="-1 tokens to generate is not positive"):
        InferenceEngine(make_model("odd"), STATE).generate(request(max_new_tokens=-1, log_probabilities=True))


def test_an_error_of_the_choice_reaches_every_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stages without logits learn of it by what is shared."""

    def fail(*given: object) -> torch.Tensor:
        raise RuntimeError("probability tensor contains inf")

    monkeypatch.setattr(prompt_batch, "choose_tokens", fail)
    with pytest.raises(RuntimeError, match="no token can be selected at position 1") as caught:
        InferenceEngine(make_model("odd"), STATE).generate(request())
    assert str(caught.value.__cause__) == "probability tensor contains inf"


@pytest.mark.parametrize(
    ("rank", "holds_embedding", "holds_loss"), [(0, True, True), (1, True, True), (0, False, True)]
)
def test_a_model_of_another_stage_is_rejected(rank: int, holds_embedding: bool, holds_loss: bool) -> None:
    contents = StageContents((0, 1), has_embedding=holds_embedding, has_loss=holds_loss)
    model = build(odd_config(), single_rank_group(), contents=contents)
    links: Any = SimpleNamespace(activations_in=None, activations_out=None)
    with pytest.raises(ConfigurationError, match=rf"stage {rank} of pipeline\(2\) does not match the model's modules"):
        StagedModel(model, describe_parallel_state(rank, 2, ParallelSizes(pp=2)), links)


def test_a_stage_waits_for_what_it_has_sent() -> None:
    sent: list[torch.Tensor] = []
    num_waits = 0

    class Work:
        def wait(self) -> None:
            nonlocal num_waits
            num_waits += 1

    class Link:
        pipeline = SimpleNamespace(observe=lambda *given: None)

        def send(self, tensor: torch.Tensor) -> Work:
            sent.append(tensor)
            return Work()

    first = StageContents((0, 1), has_embedding=True, has_loss=False)
    model = build(odd_config(), single_rank_group(), contents=first)
    links: Any = SimpleNamespace(activations_in=None, activations_out=Link())
    staged = StagedModel(model, describe_parallel_state(0, 2, ParallelSizes(pp=2)), links)
    with torch.inference_mode():
        tokens = torch.tensor([[3, 1, 4]])
        assert staged.forward(tokens, torch.arange(3)[None], CAUSAL, KeyValueCache(3), last_position_only=True) is None
    assert [tensor.shape for tensor in sent] == [(3, 1, 24)]
    assert num_waits == 0
    staged.finish()
    assert num_waits == 1


CPU = torch.device("cpu")


def test_rows_end_in_one_column_and_count_from_their_own_beginning() -> None:
    prompts = pad_left([[5, 6, 7], [8], [9, 10, 11, 12, 13]], CPU)
    assert prompts.tokens.tolist() == [[0, 0, 5, 6, 7], [0, 0, 0, 0, 8], [9, 10, 11, 12, 13]]
    assert prompts.starts.tolist() == [2, 4, 0]
    assert prompts.has_padding
    assert prompts.positions(0, 5).tolist() == [[0, 0, 0, 1, 2], [0, 0, 0, 0, 0], [0, 1, 2, 3, 4]]
    assert prompts.positions(5, 7).tolist() == [[3, 4], [1, 2], [5, 6]]


def test_no_real_column_looks_at_padding_and_none_looks_at_nothing() -> None:
    prompts = pad_left([[5, 6], [7, 8, 9]], CPU)
    mask = prompts.pattern(0, 3).mask
    assert mask is not None
    assert mask.shape == (2, 1, 3, 3)
    assert mask[0, 0].tolist() == [[True, False, False], [False, True, False], [False, True, True]]
    assert mask[1, 0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]
    later = prompts.pattern(4, 5).mask
    assert later is not None
    assert later[:, 0].tolist() == [[[False, True, True, True, True]], [[True] * 5]]


def test_a_stretch_has_the_rows_of_the_whole_mask() -> None:
    prompts = pad_left([[1] * 3, [1] * 7, [1]], CPU)
    whole, stretch = prompts.pattern(0, 7).mask, prompts.pattern(2, 5).mask
    assert whole is not None
    assert stretch is not None
    assert torch.equal(stretch, whole[:, :, 2:5, :5])


def test_prompts_of_equal_length_need_no_mask() -> None:
    assert pad_left([[1, 2], [3, 4]], CPU).pattern(0, 2) is CAUSAL


def test_prompts_of_like_length_run_together() -> None:
    prompts = [[0] * length for length in (9, 1, 8, 2, 2, 30)]
    assert list(batches_of_like_length(prompts, 2)) == [[1, 3], [2, 4], [0, 5]]
    assert list(batches_of_like_length(prompts, 32)) == [[0, 1, 2, 3, 4, 5]]
    assert list(batches_of_like_length([], 4)) == []


# Of unequal length, so that some rows are padded, and longer and shorter than the window of 5.
PROMPTS = ((1, 2, 3), (5, 6, 7, 8, 9, 10, 11, 12, 13), (4,))


@pytest.mark.default(11)
@pytest.mark.parametrize("shape", [*FAMILY_SHAPES, *LATENT_SHAPES, *SPARSE_SHAPES, *ATTENTION_SHAPES])
def test_cache_and_padding_change_no_probability(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two positions of each prompt at a time: queries then look back over the end of a stretch.
    monkeypatch.setattr(prompt_batch, "_PROMPT_TOKENS_AT_ONCE", 2 * len(PROMPTS))
    state = describe_parallel_state(0, 1)
    shapes = SHAPES | LATENT_SHAPES | SPARSE_SHAPES | ATTENTION_SHAPES
    config = resolve_cell((*BASE_FLAGS, *shapes[shape]), 1, "float64").model
    model = GPTModel(config, state.tp, RngStreams(Device("cpu"), 1, state.place), seed=3)
    request = GenerationRequest(prompts=PROMPTS, max_new_tokens=10, log_probabilities=True)
    continuations = engine.InferenceEngine(model, state).generate(request)
    for prompt, continuation in zip(PROMPTS, continuations, strict=True):
        text = torch.tensor([[*prompt, *continuation.tokens]])
        with torch.no_grad():
            logits = model.eval()(text, torch.arange(text.shape[1])[None])[:-1, 0, : config.vocab_size]
        expected = logits.log_softmax(dim=-1).gather(1, text[0, 1:, None]).squeeze(1)
        torch.testing.assert_close(torch.tensor(continuation.log_probabilities, dtype=torch.float64), expected)


def test_the_cache_of_latent_attention_keeps_the_narrow_vectors_alone() -> None:
    state = describe_parallel_state(0, 1)
    config = resolve_cell((*BASE_FLAGS, *LATENT_SHAPES["latent"]), 1, "float64").model
    model = GPTModel(config, state.tp, RngStreams(Device("cpu"), 1, state.place), seed=3)
    cache = KeyValueCache(8)
    with torch.no_grad():
        model.eval()(torch.arange(6)[None], torch.arange(6)[None], cache=cache)
    shapes = [tuple(kept.shape) for kept in cache._buffers[0]]
    assert shapes == [(8, 1, 1, config.mla.kv_lora_rank), (8, 1, 1, config.mla.qk_pos_emb_head_dim)]


GREEDY_ROW = 3


def rows_of(model: GPTModel) -> list[ScoredRow]:
    """Return rows of unequal length; one ends in the tokens that the model finds likeliest."""
    rows = [
        ScoredRow((3, 1, 4), 1),
        ScoredRow((15, 92, 6, 53, 58, 9), 4),
        ScoredRow((9, 7), 1),
        ScoredRow(tuple(range(2, 40)), 37),
    ]
    tokens = [79, 32]
    for _ in range(3):
        tokens.append(int(whole_logits(model, torch.tensor([tokens]))[-1, 0, : model.config.vocab_size].argmax()))
    rows.insert(GREEDY_ROW, ScoredRow(tuple(tokens), 3))
    return rows


@pytest.mark.parametrize("at_once", [6, 1024])
def test_scores_are_those_of_a_whole_forward_pass(at_once: int, monkeypatch) -> None:
    monkeypatch.setattr("megatron.core.inference.prompt_batch._PROMPT_TOKENS_AT_ONCE", at_once)
    model = build(odd_config(), single_rank_group())
    rows = rows_of(model)
    sizes: list[int] = []
    scores = InferenceEngine(model, STATE).score(rows, max_batch_size=3, on_batch=sizes.append)
    assert sizes == [3, 2]
    sizes.clear()
    InferenceEngine(model, STATE, max_batch_size=4).score(rows, on_batch=sizes.append)
    assert sizes == [4, 1]
    for row, score in zip(rows, scores, strict=True):
        logits = whole_logits(model, torch.tensor([row.tokens[:-1]]))[:, 0, : model.config.vocab_size]
        behind = torch.tensor(row.tokens[1:])[-row.num_scored :]
        known = logits.log_softmax(dim=-1)[-row.num_scored :]
        assert score.log_probability == pytest.approx(float(known.gather(1, behind[:, None]).sum()), abs=1e-11)
        assert score.is_greedy == bool((known.argmax(dim=-1) == behind).all())
    assert [score.is_greedy for score in scores].index(True) == GREEDY_ROW


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (ScoredRow((3,), 1), "cannot score 1 of 1 tokens"),
        (ScoredRow((3, 4), 0), "cannot score 0 of 2 tokens"),
        (ScoredRow((3, 101, 5), 1), "prompt 1 of 1 contains token 101"),
        (ScoredRow((1,) * 39, 1), "has 37 learned positions"),
    ],
)
def test_what_cannot_be_scored_is_refused(row: ScoredRow, message: str) -> None:
    engine = InferenceEngine(build(odd_config(), single_rank_group()), STATE)
    with pytest.raises(InputError, match=message):
        engine.score([row])


def test_a_target_outside_the_vocabulary_is_refused() -> None:
    engine = InferenceEngine(build(odd_config(), single_rank_group()), STATE)
    for token in (101, -1):
        with pytest.raises(InputError, match=rf"token {token} cannot be scored: the model's vocabulary is 0\.\.100"):
            engine.score([ScoredRow((3, 4, token), 1)])
    assert len(engine.score([ScoredRow((3, 4, 0), 1), ScoredRow((3, 4, 100), 1)])) == 2


def test_logits_that_are_not_finite_are_refused() -> None:
    model = build(odd_config(), single_rank_group())
    with torch.no_grad():
        next(model.parameters()).fill_(float("nan"))
    with pytest.raises(InputError, match="logits are not finite"):
        InferenceEngine(model, STATE).score([ScoredRow((3, 4, 10), 1)])


def test_the_place_of_logits_that_are_not_finite_is_named() -> None:
    """It is the last position of the row that has them, counted without the padding."""
    model = build(odd_config(untie_embeddings_and_output_weights=True), single_rank_group())
    with torch.no_grad():
        model.embedding.word_embeddings.weight[13] = torch.nan
    with pytest.raises(InputError, match="logits are not finite at position 2:"):
        InferenceEngine(model, STATE).score([ScoredRow((3, 4, 10, 5, 6), 1), ScoredRow((3, 4, 13, 5), 1)])
