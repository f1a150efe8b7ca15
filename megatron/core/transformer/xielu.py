"""xIELU, an activation with learned slopes: Huang and Schlag 2024, https://arxiv.org/abs/2411.13010."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import make_parameter, replicated_spec

_BETA, _EPS, _SLOPE = 0.5, -1e-6, 0.8
"""Slope at zero, upper bound of the exponential's argument, and initial values of both quadratic slopes."""


class XIELU(nn.Module):
    """xIELU: ``ap x^2 + beta x`` above zero, ``an (exp(min(x, eps)) - 1 - x) + beta x`` below.

    ``ap`` is the softplus of ``alpha_p``, and ``an`` is ``beta`` plus the softplus of ``alpha_n``. Both are learned,
    and ``beta`` and ``eps`` are constants that models store with their weights. Each tensor-parallel rank has the
    gradient of its own features.

    Shapes: ``[..., ffn/tp] -> [..., ffn/tp]``, parameters ``[1]``.
    """

    def __init__(self, tp: Group, dtype: torch.dtype, device: torch.device | str) -> None:
        super().__init__()

        def parameter(name: str, mean: float) -> nn.Parameter:
            return make_parameter((1,), replicated_spec(name, (1,), tp, True, mean=mean), dtype, device)

        self.alpha_p = parameter("alpha_p", math.log(math.expm1(_SLOPE)))
        self.alpha_n = parameter("alpha_n", math.log(math.expm1(_SLOPE - _BETA)))
        self.beta = parameter("beta", _BETA).requires_grad_(False)
        self.eps = parameter("eps", _EPS).requires_grad_(False)
        self.compute = xielu

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compute(x, self.alpha_p, self.alpha_n, self.beta, self.eps)


def xielu(
    x: torch.Tensor, alpha_p: torch.Tensor, alpha_n: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
) -> torch.Tensor:
    """Return xIELU of ``x``, computed in at least float32, in the dtype of ``x``."""
    dtype = arithmetic_dtype(x.dtype)
    beta, eps = beta.to(dtype), eps.to(dtype)
    result: torch.Tensor = _Curve.apply(  # type: ignore[no-untyped-call]
        x, F.softplus(alpha_p.to(dtype)), beta + F.softplus(alpha_n.to(dtype)), beta, eps
    )
    return result


class _Curve(torch.autograd.Function):
    """xIELU for given slopes; saves only ``x`` for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, above: torch.Tensor, below: torch.Tensor, beta: torch.Tensor, eps: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(x, above, below, beta, eps)
        wide = x.to(above.dtype)
        bent = torch.where(wide > 0, above * wide * wide, below * (torch.expm1(torch.minimum(wide, eps)) - wide))
        return (bent + beta * wide).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, above, below, beta, eps = ctx.saved_tensors
        wide, grad = x.to(above.dtype), grad.to(above.dtype)
        is_above = wide > 0
        exponential = torch.expm1(torch.minimum(wide, eps))
        # The exponential is constant from eps to zero.
        slope = torch.where(is_above, 2 * above * wide, below * torch.where(wide < eps, exponential, -1.0))
        of_above = torch.where(is_above, grad * wide * wide, 0.0).sum().view(1)
        of_below = torch.where(is_above, 0.0, grad * (exponential - wide)).sum().view(1)
        return (grad * (slope + beta)).to(x.dtype), of_above, of_below, None, None
