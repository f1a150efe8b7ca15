"""Norms against float64 written out in NumPy, residual streams through them, and which calls go to Triton."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.ops.attention_pattern import AttentionPattern
from megatron.core.process_group import single_rank_group
from megatron.core.transformer import norm as norm_module
from megatron.core.transformer.norm import Norm, ResidualNorm
from tests.harness.toy_model import load_global_weights, make_model
from tests.unit.core.ops.interpreted import needs_triton


def make(kind: str, dtype: torch.dtype, epsilon: float = 1e-5, centered_weight: bool = False) -> Norm:
    norm = Norm(
        kind,
        19,
        epsilon,
        single_rank_group(),
        partial_gradient=False,
        centered_weight=centered_weight,
        dtype=dtype,
        device="cpu",
    )
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(19, generator=generator, dtype=torch.float64))
    return norm


def reference(norm: Norm, x: torch.Tensor) -> np.ndarray:
    wide = x.detach().double().numpy()
    weight = norm.weight.detach().double().numpy() + (1.0 if norm.centered_weight else 0.0)
    if norm.kind == "RMSNorm":
        return wide / np.sqrt((wide**2).mean(-1, keepdims=True) + norm.epsilon) * weight
    assert norm.bias is not None
    centered = wide - wide.mean(-1, keepdims=True)
    scaled = centered / np.sqrt((centered**2).mean(-1, keepdims=True) + norm.epsilon)
    return scaled * weight + norm.bias.detach().double().numpy()


def inputs(dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(5, 3, 19, generator=torch.Generator().manual_seed(2), dtype=torch.float64) * 4 + 1).to(dtype)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize("centered_weight", [False, True])
@pytest.mark.parametrize("epsilon", [1e-5, 0.3])
def test_float64_stays_float64(kind: str, centered_weight: bool, epsilon: float) -> None:
    norm = make(kind, torch.float64, epsilon, centered_weight)
    x = inputs(torch.float64)
    output = norm(x)
    assert output.dtype == torch.float64
    np.testing.assert_allclose(output.detach().numpy(), reference(norm, x), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
@pytest.mark.parametrize(("dtype", "epsilon"), [(torch.bfloat16, 2**-8), (torch.float16, 2**-11)])
def test_low_precision_is_normalized_in_float32(kind: str, dtype: torch.dtype, epsilon: float) -> None:
    """At most two roundings of the result; the mean of squares of 200 * 200 would overflow float16."""
    norm = make(kind, dtype)
    x = inputs(dtype) * 200
    output = norm(x)
    assert output.dtype == dtype
    expected = reference(norm, x)
    np.testing.assert_allclose(output.detach().double().numpy(), expected, rtol=2.1 * epsilon, atol=4 * epsilon)


@pytest.mark.parametrize("kind", ["LayerNorm", "RMSNorm"])
def test_gradients(kind: str) -> None:
    norm = make(kind, torch.float64)
    x = inputs(torch.float64).requires_grad_()
    assert torch.autograd.gradcheck(norm, (x,))
    assert torch.autograd.gradcheck(
        lambda weight: torch.func.functional_call(norm, {"weight": weight}, (x,)),
        (norm.weight.detach().requires_grad_(),),
    )


def test_only_layernorm_has_a_bias() -> None:
    assert make("RMSNorm", torch.float32).bias is None
    assert make("LayerNorm", torch.float32).bias is not None


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


def make_residual_norm(kind: str, centered_weight: bool) -> ResidualNorm:
    options: dict[str, Any] = {"partial_gradient": False, "centered_weight": centered_weight}
    return ResidualNorm(kind, 8, 1e-5, single_rank_group(), dtype=torch.float32, device="cpu", **options)


@needs_triton
def test_the_program_is_given_what_it_can_normalize(monkeypatch: pytest.MonkeyPatch) -> None:
    from megatron.core.ops.triton import residual as programs

    calls: list[dict[str, Any]] = []

    def add_and_normalize(x: torch.Tensor, *given: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        calls.append(options)
        return x, x

    monkeypatch.setattr(norm_module, "runs_on_triton", lambda *tensors: True)
    monkeypatch.setattr(programs, "add_and_normalize", add_and_normalize)
    x = torch.randn(2, 3, 8)
    for kind in ("LayerNorm", "RMSNorm"):
        for centered in (False, True):
            make_residual_norm(kind, centered)(x, x)
    given = [(call["subtracts_mean"], call["weight_offset"], call["probability"]) for call in calls]
    assert given == [(True, 0.0, 0.0), (True, 1.0, 0.0), (False, 0.0, 0.0), (False, 1.0, 0.0)]
    norm = make_residual_norm("RMSNorm", False)
    norm(x, x.double())
    monkeypatch.setattr(programs, "MAX_WIDTH", 7)
    norm(x, x)
    assert len(calls) == 4
    monkeypatch.setattr(programs, "MAX_WIDTH", 8)
    norm(x)
    assert len(calls) == 5
