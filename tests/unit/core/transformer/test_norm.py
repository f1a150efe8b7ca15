"""Norms against float64 written out in NumPy, and the precision that they compute in."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron.core.process_group import single_rank_group
from megatron.core.transformer.norm import Norm


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
