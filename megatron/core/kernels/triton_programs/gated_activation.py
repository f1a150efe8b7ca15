"""Gated activations: ``[..., 2f] -> [..., f]`` in one pass, with one rounding."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

KINDS = ("swiglu", "geglu")
"""The gated activations that are written here."""
_BLOCK = 1024


@triton.jit
def _activation_and_slope(x, KIND: tl.constexpr):
    """Return the activation of ``x`` and its derivative."""
    tl.static_assert(KIND == "swiglu" or KIND == "geglu", "a gated activation without a program")
    if KIND == "geglu":
        # (1 + tanh(u)) / 2 is sigmoid(2u); below are 2u, with 2 * sqrt(2 / pi) in front, and its derivative.
        inner = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        inner = x
        slope = 1.0
    gate = tl.sigmoid(inner)
    return x * gate, gate + x * gate * (1.0 - gate) * slope


@triton.jit
def forward_program(x: tl.tensor, y: tl.tensor, width: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Write one block of a row of ``y: [n, width]`` from ``x: [n, 2 * width]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x += row * width * 2
    gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + width + column, mask=inside, other=0.0).to(tl.float32)
    activated, _ = _activation_and_slope(gate, KIND)
    tl.store(y + row * width + column, (activated * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def backward_program(
    grad: tl.tensor, x: tl.tensor, x_grad: tl.tensor, width: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Write one block of both halves of a row of ``x_grad``; the activation is computed anew."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x += row * width * 2
    x_grad += row * width * 2
    gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + width + column, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    activated, slope = _activation_and_slope(gate, KIND)
    tl.store(x_grad + column, (out * up * slope).to(x_grad.dtype.element_ty), mask=inside)
    tl.store(x_grad + width + column, (out * activated).to(x_grad.dtype.element_ty), mask=inside)


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str) -> torch.Tensor:
        x = x.contiguous()
        ctx.save_for_backward(x)
        ctx.kind = kind
        y = x.new_empty((*x.shape[:-1], x.shape[-1] // 2))
        if y.numel():
            forward_program[_grid(y)](x, y, y.shape[-1], KIND=kind, BLOCK=_BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        x_grad = torch.empty_like(x)
        if x.numel():
            backward_program[_grid(grad)](grad.contiguous(), x, x_grad, grad.shape[-1], KIND=ctx.kind, BLOCK=_BLOCK)
        return x_grad, None


def _grid(y: torch.Tensor) -> tuple[int, int]:
    return y.numel() // y.shape[-1], triton.cdiv(y.shape[-1], _BLOCK)


def gated_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Do what the torch twin of the same name does, for one of `KINDS`."""
    assert kind in KINDS, kind
    result: torch.Tensor = _GatedActivation.apply(x, kind)
    return result
