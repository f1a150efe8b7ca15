"""Gates with an offset and limits: the formulas written out, their gradients, and what is kept for them."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core.ops.gated_activation import gated_activation

KINDS = {
    "swiglu": F.silu,
    "geglu": lambda gate: F.gelu(gate, approximate="tanh"),
    "quick_geglu": lambda gate: gate * torch.sigmoid(1.702 * gate),
}
CASES = [(kind, 1.0, 0.75) for kind in KINDS] + [("quick_geglu", 0.0, None), ("swiglu", 0.5, None)]


def values(dtype: torch.dtype = torch.float64) -> torch.Tensor:
    found = torch.randn(5, 3, 14, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    # A gate and both ends of what multiplies it exactly at the limit of most cases.
    found[0, 0, [0, 8, 9]] = torch.tensor([0.75, 0.75, -0.75], dtype=torch.float64)
    return found.to(dtype)


@pytest.mark.parametrize(("kind", "offset", "limit"), CASES)
def test_value_and_gradient_are_those_of_the_formula(kind: str, offset: float, limit: float | None) -> None:
    ours, theirs = values().requires_grad_(), values().requires_grad_()
    gate, up = theirs.chunk(2, dim=-1)
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    expected = KINDS[kind](gate) * (up + offset)
    found = gated_activation(ours, kind, offset, limit)
    weights = torch.arange(found.numel(), dtype=torch.float64).view_as(found)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    (our_grad,) = torch.autograd.grad((found * weights).sum(), ours)
    (their_grad,) = torch.autograd.grad((expected * weights).sum(), theirs)
    torch.testing.assert_close(our_grad, their_grad, rtol=1e-12, atol=1e-12)


def test_the_input_alone_is_kept_and_the_result_rounded_once() -> None:
    x = values(torch.bfloat16).requires_grad_()
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        found = gated_activation(x, "quick_geglu", 1.0, 7.0)
    assert [tensor.data_ptr() for tensor in kept] == [x.data_ptr()]
    exact = gated_activation(x.detach().float(), "quick_geglu", 1.0, 7.0)
    assert torch.equal(found, exact.to(torch.bfloat16))
