"""LongRoPE: texts of each length are continued as whole forward passes say, and none crosses the original length."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import InputError
from megatron.core.inference import prompt_batch, running_batch
from megatron.core.inference.beam_search import BeamConfig
from megatron.core.inference.cached_forward import CachedForward
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import GenerationRequest, new_tokens_that_fit
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_state import describe_parallel_state
from tests.unit.core.inference.small_models import build, odd_config, whole_logits
from tests.unit.core.inference.test_continuous_engine import check_equal, run_together

ALONE = describe_parallel_state(0, 1)
ORIGINAL, NEW = 9, 5
LONGROPE = {
    "position_embedding_type": "rope",
    "longrope_short_factor": (1.0, 1.2, 1.5),
    "longrope_long_factor": (1.0, 4.0, 11.0),
    "longrope_original_max_position_embeddings": ORIGINAL,
    "longrope_attention_factor": 1.3,
}
PROMPTS = ((3, 1, 4), tuple(range(20, 31)), (15, 92, 6, 53, 58), tuple(range(50, 66)))
"""Two of up to five tokens, and two longer than the original length."""


@pytest.fixture(scope="module")
def engine() -> InferenceEngine:
    return InferenceEngine(build(odd_config(**LONGROPE), ALONE.tp), ALONE)


def greedy(prompts: tuple[tuple[int, ...], ...], count: int = NEW) -> GenerationRequest:
    return GenerationRequest(prompts=prompts, max_new_tokens=count, sampling=SamplingConfig(greedy=True))


def continued(engine: InferenceEngine, prompt: tuple[int, ...], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(whole_logits(engine.model, torch.tensor([tokens]))[-1, 0, :101].argmax()))
    return tokens[len(prompt) :]


def test_short_and_long_prompts_of_a_batch_in_parts_are_continued_as_without_a_cache(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_batch, "_PROMPT_TOKENS_AT_ONCE", 12)
    found = engine.generate(greedy(PROMPTS))
    assert [each.tokens for each in found] == [continued(engine, prompt, NEW) for prompt in PROMPTS]
    (best,) = engine.generate(GenerationRequest(prompts=(PROMPTS[1],), max_new_tokens=4, beams=BeamConfig(num_beams=3)))
    for text in best.hypotheses:
        logits = whole_logits(engine.model, torch.tensor([[*PROMPTS[1], *text.tokens[:-1]]]))[10:, 0, :101]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(text.tokens)[:, None]).sum().item()
        assert chosen / 4 == pytest.approx(text.score, rel=1e-9)


def test_rows_of_a_continuous_batch_keep_their_factors(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(running_batch, "_PROMPT_TOKENS_AT_ONCE", 6)
    requests = {number: greedy((prompt,)) for number, prompt in enumerate(PROMPTS)}
    found = run_together(engine, requests, 3)
    for number, request in requests.items():
        check_equal(found[number], engine.generate(request))


def test_the_factors_change_the_logits(engine: InferenceEngine) -> None:
    tokens = torch.arange(20, 31)[None]
    short = build(odd_config(**LONGROPE | {"longrope_original_max_position_embeddings": 11}), ALONE.tp)
    assert (whole_logits(engine.model, tokens) - whole_logits(short, tokens)).abs().max() > 1e-2


def test_a_text_that_would_cross_the_original_length_is_rejected(engine: InferenceEngine) -> None:
    problem = (
        r"prompt 1 of 1 has 5 tokens; with 6 tokens to generate the length is 11, but LongRoPE rotates all positions "
        r"differently in texts of more than 9 tokens; generate at most 5, or use a prompt of more than 9 tokens$"
    )
    with pytest.raises(InputError, match=problem):
        engine.generate(greedy((PROMPTS[2],), 6))


@pytest.mark.parametrize(("lengths", "fitting"), [((5,), 5), ((9,), 1), ((10,), 8), ((3, 10), 7), ((3, 7), 3)])
def test_default_numbers_of_new_tokens_stop_at_the_original_length(
    engine: InferenceEngine, lengths: tuple[int, ...], fitting: int
) -> None:
    assert new_tokens_that_fit(engine.model.config, lengths, 8) == fitting


def test_rows_that_grow_over_the_original_length_are_computed_anew(engine: InferenceEngine) -> None:
    """As in transformers, whose models generate with this forward pass."""
    forward, tokens = CachedForward(engine.model), torch.randint(0, 101, (2, 14))
    mask = torch.ones_like(tokens)
    positions = torch.arange(14).expand(2, -1)
    for end in range(6, 15):
        found = forward.logits(tokens[:, :end], mask[:, :end], positions[:, :end], num_last=1, keeps_cache=True)
        alone = whole_logits(engine.model, tokens[:, :end])[-1, :, :101]
        torch.testing.assert_close(found[:, 0], alone, rtol=1e-11, atol=1e-11)
