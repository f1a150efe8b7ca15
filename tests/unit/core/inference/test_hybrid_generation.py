"""Models with recurrent layers or sparse attention generate what whole forward passes give, batched in either way."""

from __future__ import annotations

import pytest
import torch

from megatron.core.errors import InputError
from megatron.core.inference import prompt_batch, running_batch
from megatron.core.inference.beam_search import BeamConfig
from megatron.core.inference.cached_forward import CachedForward
from megatron.core.inference.engine import InferenceEngine
from megatron.core.inference.inference_request import GenerationRequest
from megatron.core.inference.sampling_config import SamplingConfig
from megatron.core.parallel_state import describe_parallel_state
from tests.unit.core.inference.small_models import build, odd_config, whole_logits
from tests.unit.core.inference.test_continuous_engine import REQUESTS, check_equal, run_together

ALONE = describe_parallel_state(0, 1)
DELTA = {"linear_key_head_dim": 4, "linear_value_head_dim": 6, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
SHAPES: dict[str, dict[str, object]] = {
    "delta-net": {"experimental_attention_variant": "gated_delta_net", "linear_attention_freq": "3", **DELTA},
    "kimi": {
        "num_layers": 4,
        "experimental_attention_variant": "kimi_delta_attention",
        "linear_attention_freq": "[1,0,1,1]",
        "multi_latent_attention": True,
        "position_embedding_type": "none",
        "num_query_groups": 4,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 3,
        "v_head_dim": 5,
        **DELTA,
    },
    "sparse": {
        "num_layers": 3,
        "experimental_attention_variant": "dsa",
        "multi_latent_attention": True,
        "position_embedding_type": "rope",
        "num_query_groups": 4,
        "kv_lora_rank": 10,
        "qk_head_dim": 6,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 5,
        "dsa_indexer_n_heads": 5,
        "dsa_indexer_head_dim": 7,
        "dsa_indexer_topk": 4,
        "dsa_indexer_layer_freq": "2",
    },
    "mamba": {
        "num_layers": 5,
        "hybrid_override_pattern": "MGP-*",
        "attention_output_gate": True,
        "mamba_state_dim": 5,
        "mamba_head_dim": 6,
        "mamba_num_groups": 2,
        **DELTA,
    },
}


@pytest.fixture(params=SHAPES, scope="module")
def engine(request: pytest.FixtureRequest) -> InferenceEngine:
    return InferenceEngine(build(odd_config(**SHAPES[request.param]), ALONE.tp), ALONE)


def test_padded_prompts_in_parts_and_beams_are_continued_as_without_a_cache(
    engine: InferenceEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_batch, "_PROMPT_TOKENS_AT_ONCE", 12)
    prompts = ((3, 1, 4), (15, 92, 6, 53, 58), (9,), (46, 26, 43, 38, 32, 79, 50, 2))
    request = GenerationRequest(prompts=prompts, max_new_tokens=6, sampling=SamplingConfig(greedy=True))
    for prompt, found in zip(prompts, engine.generate(request), strict=True):
        tokens = list(prompt)
        for _ in range(6):
            logits = whole_logits(engine.model, torch.tensor([tokens]))[-1, 0, :101]
            tokens.append(int(logits.argmax()))
        assert found.tokens == tokens[len(prompt) :]
    (best,) = engine.generate(GenerationRequest(prompts=((7, 8),), max_new_tokens=4, beams=BeamConfig(num_beams=3)))
    for text in best.hypotheses:
        logits = whole_logits(engine.model, torch.tensor([[7, 8, *text.tokens[:-1]]]))[1:, 0, :101]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(text.tokens)[:, None]).sum().item()
        assert chosen / 4 == pytest.approx(text.score, rel=1e-9)


@pytest.mark.parametrize("max_rows", [16, 3])
def test_rows_of_a_continuous_batch_keep_their_states(
    engine: InferenceEngine, max_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So few that the prompts are shown in parts, and the rest of one together with other prompts.
    monkeypatch.setattr(running_batch, "_PROMPT_TOKENS_AT_ONCE", 6)
    monkeypatch.setattr(running_batch, "_SCORED_TOKENS_AT_ONCE", 3)
    found = run_together(engine, dict(enumerate(REQUESTS)), max_rows)
    for number, request in enumerate(REQUESTS):
        check_equal(found[number], engine.generate(request))


def test_rows_of_a_cached_forward_are_padded_on_the_left_only(engine: InferenceEngine) -> None:
    forward, tokens = CachedForward(engine.model), torch.randint(0, 101, (2, 9))
    mask = torch.ones_like(tokens)
    mask[1, :3] = 0
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    parts = [
        forward.logits(tokens[:, :end], mask[:, :end], positions[:, :end], num_last=1, keeps_cache=True)
        for end in (5, 6, 9)
    ]
    alone = whole_logits(engine.model, tokens[1:, 3:])[..., :101]
    torch.testing.assert_close(torch.stack([part[1, 0] for part in parts]), alone[[1, 2, 5], 0], rtol=1e-11, atol=1e-11)
    if engine.model.config.hybrid.is_hybrid:
        mask[1, 5] = 0
        with pytest.raises(InputError, match="padding on the left"):
            forward.logits(tokens, mask, positions)
