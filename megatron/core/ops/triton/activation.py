"""Triton kernels of activations: plain ones with the bias gradient, and gated ones in one kernel.

A plain activation's forward pass is one torch operation. Its backward kernel also sums the gradient of the preceding
bias: two reads, one write. A gated activation maps ``[..., 2f] -> [..., f]`` with one rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.main_grad import Receiver, receive_parts

PLAIN_KINDS = ("gelu", "gelu_tanh", "squared_relu")
"""Activations that the backward kernel supports; torch differentiates all others."""
_BLOCK = 1024
_MAX_PARTS = 256


@triton.jit
def activation_of(x, KIND: tl.constexpr):
    """Return the activation of ``x``."""
    tl.static_assert(KIND == "gelu" or KIND == "gelu_tanh" or KIND == "squared_relu", "an activation without a program")
    if KIND == "gelu":
        result = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    elif KIND == "gelu_tanh":
        # As in a gated activation: the tanh approximation is x * sigmoid(u).
        result = x * tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
    else:
        positive = tl.maximum(x, 0.0)
        result = positive * positive
    return result


@triton.jit
def slope_of(x, KIND: tl.constexpr):
    """Return the derivative of an activation at ``x``."""
    tl.static_assert(KIND == "gelu" or KIND == "gelu_tanh" or KIND == "squared_relu", "an activation without a slope")
    if KIND == "gelu":
        # The normal distribution's CDF and density.
        slope = 0.5 * (1.0 + tl.erf(0.7071067811865476 * x)) + x * (0.3989422804014327 * tl.exp(-0.5 * x * x))
    elif KIND == "gelu_tanh":
        # As in a gated activation: the tanh approximation is x * sigmoid(u).
        gate = tl.sigmoid(1.5957691216057308 * x * (1.0 + 0.044715 * x * x))
        slope = gate + x * gate * (1.0 - gate) * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
    else:
        slope = 2.0 * tl.maximum(x, 0.0)
    return slope


@triton.jit
def plain_backward_program(
    grad: tl.tensor,
    x: tl.tensor,
    x_grad: tl.tensor,
    bias_parts: tl.tensor,
    num_rows: tl.tensor,
    rows_per_part: tl.tensor,
    width: tl.tensor,
    KIND: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one block of columns of some rows of ``x_grad``, and their sum over rows."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * rows_per_part, tl.minimum((part + 1) * rows_per_part, num_rows)):
        at = row * width + column
        out = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        out *= slope_of(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), KIND)
        tl.store(x_grad + at, out.to(x_grad.dtype.element_ty), mask=inside)
        total += out
    tl.store(bias_parts + part * width + column, total, mask=inside)


class _BiasedActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        bias: torch.Tensor,
        activation: Callable[[torch.Tensor], torch.Tensor],
        kind: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.kind, ctx.receiver = kind, Receiver.of(bias)
        return activation(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        width = x.shape[-1]
        num_rows = x.numel() // width
        rows_per_part = max(1, triton.cdiv(num_rows, _MAX_PARTS))
        num_parts = triton.cdiv(num_rows, rows_per_part)
        parts = x.new_empty((1, num_parts, width), dtype=torch.float32)
        x_grad = torch.empty_like(x, memory_format=torch.contiguous_format)
        if num_rows:
            plain_backward_program[(num_parts, triton.cdiv(width, _BLOCK))](
                grad.contiguous(), x.contiguous(), x_grad, parts, num_rows, rows_per_part, width,
                KIND=ctx.kind, BLOCK=_BLOCK,
            )  # fmt: skip
        return x_grad, *receive_parts(parts, [ctx.receiver]), None, None


def activate_with_bias(
    x: torch.Tensor, bias: torch.Tensor, activation: Callable[[torch.Tensor], torch.Tensor], kind: str
) -> torch.Tensor:
    """Return ``activation(x)``, with a gradient for ``bias``, which ``x`` already includes.

    ``kind`` is the name of the activation, one of `PLAIN_KINDS`.

    Shapes: ``x: [..., f]``, ``bias: [f] -> [..., f]``.
    """
    assert kind in PLAIN_KINDS, kind
    result: torch.Tensor = _BiasedActivation.apply(x, bias, activation, kind)
    return result


GATED_KINDS = ("swiglu", "geglu")
"""Gated activations that the kernels support."""


@triton.jit
def activation_and_slope(x, KIND: tl.constexpr):
    """Return the activation of ``x`` and its derivative."""
    tl.static_assert(KIND == "swiglu" or KIND == "geglu", "a gated activation without a program")
    if KIND == "geglu":
        # (1 + tanh(u)) / 2 is sigmoid(2u); below are 2u, with the factor 2 * sqrt(2 / pi), and its derivative.
        inner = 1.5957691216057308 * x * (1.0 + 0.044715 * x * x)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
    else:
        inner = x
        slope = 1.0
    gate = tl.sigmoid(inner)
    return x * gate, gate + x * gate * (1.0 - gate) * slope


@triton.jit
def rounded_gradients(out, gate, up, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """Return the gradients of both halves of a gated activation's input, and the activation, rounded to a dtype."""
    activated, slope = activation_and_slope(gate, KIND)
    gate_grad = (out * up * slope).to(DTYPE).to(tl.float32)
    up_grad = (out * activated).to(DTYPE).to(tl.float32)
    return gate_grad, up_grad, (activated * up).to(DTYPE).to(tl.float32)


@triton.jit
def gated_forward_program(x: tl.tensor, y: tl.tensor, width: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr):
    """Write one block of a row of ``y: [n, width]`` from ``x: [n, 2 * width]``."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x += row * width * 2
    gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + width + column, mask=inside, other=0.0).to(tl.float32)
    activated, _ = activation_and_slope(gate, KIND)
    tl.store(y + row * width + column, (activated * up).to(y.dtype.element_ty), mask=inside)


@triton.jit
def gated_backward_program(
    grad: tl.tensor, x: tl.tensor, x_grad: tl.tensor, width: tl.tensor, KIND: tl.constexpr, BLOCK: tl.constexpr
):
    """Write one block of both halves of a row of ``x_grad``, recomputing the activation."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    x += row * width * 2
    x_grad += row * width * 2
    gate = tl.load(x + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + width + column, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
    activated, slope = activation_and_slope(gate, KIND)
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
            gated_forward_program[_grid(y)](x, y, y.shape[-1], KIND=kind, BLOCK=_BLOCK)
        return y

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        x_grad = torch.empty_like(x)
        if x.numel():
            gated_backward_program[_grid(grad)](
                grad.contiguous(), x, x_grad, grad.shape[-1], KIND=ctx.kind, BLOCK=_BLOCK
            )
        return x_grad, None


def _grid(y: torch.Tensor) -> tuple[int, int]:
    return y.numel() // y.shape[-1], triton.cdiv(y.shape[-1], _BLOCK)


def gated_activation(x: torch.Tensor, kind: str) -> torch.Tensor:
    """Triton version of the torch function of the same name, for one of `GATED_KINDS`."""
    assert kind in GATED_KINDS, kind
    result: torch.Tensor = _GatedActivation.apply(x, kind)
    return result
