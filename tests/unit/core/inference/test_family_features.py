"""Windows, capped scores, other norms and positions: a cached continuation is what the whole text gives."""

from __future__ import annotations

import pytest
import torch

from megatron.core.device import Device
from megatron.core.inference import engine, prompt_batch
from megatron.core.inference.inference_request import GenerationRequest
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.tensor_parallel.random import RngStreams
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.verification.cells import BASE_FLAGS, FAMILY_SHAPES, SHAPES
from megatron.verification.model_cells import ATTENTION_SHAPES, LATENT_SHAPES
from megatron.verification.run_cell import resolve_cell

# Of unequal length, so that some rows are padded, and longer and shorter than the window of 5.
PROMPTS = ((1, 2, 3), (5, 6, 7, 8, 9, 10, 11, 12, 13), (4,))


@pytest.mark.default(11)
@pytest.mark.parametrize("shape", [*FAMILY_SHAPES, *LATENT_SHAPES, *ATTENTION_SHAPES])
def test_cache_and_padding_change_no_probability(shape: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Two positions of each prompt at a time: queries then look back over the end of a stretch.
    monkeypatch.setattr(prompt_batch, "_PROMPT_TOKENS_AT_ONCE", 2 * len(PROMPTS))
    state = describe_parallel_state(0, 1)
    config = resolve_cell((*BASE_FLAGS, *(SHAPES | LATENT_SHAPES | ATTENTION_SHAPES)[shape]), 1, "float64").model
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
    assert shapes == [(8, 1, 1, config.kv_lora_rank), (8, 1, 1, config.qk_pos_emb_head_dim)]
