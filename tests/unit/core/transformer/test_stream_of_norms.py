"""A residual stream that goes through the norms, against the sum written out, and computed again in every way."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.process_group import single_rank_group
from tests.harness.toy_model import load_global_weights, make_model

FLAG = {"apply_residual_connection_post_layernorm": True, "params_dtype": "float64"}


def model(**settings: Any) -> GPTModel:
    made = make_model(single_rank_group(), **FLAG, **settings)
    load_global_weights(made)
    return made.train()


def states() -> torch.Tensor:
    values = torch.randn(9, 3, 28, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    return values.requires_grad_()


def written_out(made: GPTModel, x: torch.Tensor) -> torch.Tensor:
    for layer in made.decoder.layers.values():
        x = layer.input_layernorm(x)[0]
        x = x + layer.self_attention(x, AttentionPattern(), None)[0]
        x = layer.pre_mlp_layernorm(x)[0]
        x = x + layer.mlp(x)[0]
    return made.decoder.final_layernorm(x)


def step(made: GPTModel, outputs: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
    parameters = list(made.decoder.parameters())
    return [outputs, *torch.autograd.grad(outputs.square().sum(), [x, *parameters])]


WAYS: dict[str, dict[str, Any]] = {
    "kept": {},
    "parts": {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "mlp")},
    "pairs": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 2},
    "one": {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 1},
}


@pytest.mark.parametrize("way", WAYS)
def test_the_norm_of_a_sum_is_the_stream_behind_it(way: str) -> None:
    x = states()
    made = model(**WAYS[way])
    found = step(made, made.decoder(x, AttentionPattern(), None)[0], x)
    expected = step(made, written_out(made, x), x)
    assert all(torch.allclose(ours, theirs, rtol=1e-12, atol=1e-12) for ours, theirs in zip(found, expected))


def test_a_stream_around_the_norms_gives_another_result() -> None:
    x = states()
    through = model().decoder(x, AttentionPattern(), None)[0]
    plain = make_model(single_rank_group(), params_dtype="float64")
    load_global_weights(plain)
    assert not torch.allclose(plain.decoder(x, AttentionPattern(), None)[0], through)
