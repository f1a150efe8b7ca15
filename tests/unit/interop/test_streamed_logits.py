"""Logits of a model that is never whole in memory are those of the whole model."""

from __future__ import annotations

import pytest
import torch

from megatron.checkpoint import inference_model
from megatron.checkpoint.inference_model import sample_tokens
from megatron.core.config_base import config_to_dict
from megatron.core.process_group import single_rank_group
from megatron.core.sharding import spec_of
from tests.unit.core.inference.small_models import build, odd_config
from tests.unit.interop.memory_source import MemorySource


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"untie_embeddings_and_output_weights": True, "swiglu": True, "normalization": "RMSNorm"},
        {"position_embedding_type": "rope", "add_bias_linear": False, "add_qkv_bias": True},
    ],
)
def test_logits_are_those_of_the_whole_model(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference_model, "MAX_READ_BYTES", 1000)
    config = odd_config(params_dtype="float32", hidden_dropout=0.5, tensor_model_parallel_size=2, **changes)
    model = build(config, single_rank_group())
    tensors = {}
    for parameter in model.parameters():
        spec = spec_of(parameter)
        tensors[f"model.{spec.name}"] = parameter.detach()[tuple(slice(size) for size in spec.global_shape)]
    source = MemorySource(tensors, {"config": {"model": config_to_dict(config)}})
    tokens = sample_tokens(config)
    assert tokens.shape == (2, 12)
    assert int(tokens.max()) < config.vocab_size
    logits = inference_model.streamed_logits(source, tokens)
    assert logits.shape == (2, 12, config.vocab_size)
    with torch.no_grad():
        expected = model(tokens, torch.arange(12).expand(2, 12))[:, :, : config.vocab_size].transpose(0, 1)
    assert torch.allclose(logits, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    assert float(expected.abs().max()) > 0.1


def test_tokens_stay_within_the_learned_positions() -> None:
    assert sample_tokens(odd_config(max_position_embeddings=5)).shape == (2, 5)
    assert sample_tokens(odd_config(max_position_embeddings=5, position_embedding_type="rope")).shape == (2, 12)
