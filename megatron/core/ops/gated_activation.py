"""Gated activations (SwiGLU and GeGLU: Shazeer 2020, https://arxiv.org/abs/2002.05202)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.ops.triton_support import runs_on_triton
from megatron.core.precision import arithmetic_dtype

_STEEPNESS = {"swiglu": 1.0, "quick_geglu": 1.702}
"""Slopes of the activations of the form ``x * sigmoid(slope * x)``."""
_GATES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "swiglu": F.silu,
    "geglu": partial(F.gelu, approximate="tanh"),
}
"""Gated activations whose activation is a single torch function."""


def gated_activation(x: torch.Tensor, kind: str, offset: float = 0.0, limit: float | None = None) -> torch.Tensor:
    """Return the activation of the first half of the channels times the second half.

    ``kind`` is swiglu, geglu (tanh approximation of GELU) or quick_geglu (``x * sigmoid(1.702 x)``). ``offset`` is
    added to the second half. ``limit`` clamps the first half from above, and the absolute value of the second half
    before ``offset`` is added.

    Shapes: ``[..., 2f] -> [..., f]``.
    """
    if kind not in _GATES or offset != 0.0 or limit is not None:
        if torch.compiler.is_compiling():
            gate, up = _limited(x, limit)
            return (_activated(gate, kind) * (up + offset)).to(x.dtype)
        result: torch.Tensor = _LimitedGate.apply(x, kind, offset, limit)  # type: ignore[no-untyped-call]
        return result
    if runs_on_triton(x):
        from megatron.core.ops.triton import GATED_KINDS
        from megatron.core.ops.triton import gated_activation as on_triton

        if kind in GATED_KINDS:
            return on_triton(x, kind)
    gate, up = x.chunk(2, dim=-1)
    return _GATES[kind](gate) * up


def gated_kind_of(activation: Callable[[torch.Tensor], torch.Tensor]) -> str | None:
    """Return the kind of a partial call of `gated_activation` without offset and limit, or None for other functions."""
    if not isinstance(activation, partial) or activation.func is not gated_activation:
        return None
    options = activation.keywords
    is_plain = options.get("offset", 0.0) == 0.0 and options.get("limit") is None
    return str(options["kind"]) if is_plain else None


class _LimitedGate(torch.autograd.Function):
    """Gated activation in float32 that saves only its input for the backward pass, like the Triton kernels."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kind: str, offset: float, limit: float | None) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.kind, ctx.offset, ctx.limit = kind, offset, limit
        gate, up = _limited(x, limit)
        return (_activated(gate, kind) * (up + offset)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        (x,) = ctx.saved_tensors
        gate, up = _limited(x, ctx.limit)
        wide = grad.to(gate.dtype)
        gate_grad, up_grad = (
            _activated_grad(wide * (up + ctx.offset), gate, ctx.kind),
            wide * _activated(gate, ctx.kind),
        )
        if ctx.limit is not None:
            whole_gate, whole_up = x.chunk(2, dim=-1)
            gate_grad = gate_grad.where(whole_gate <= ctx.limit, 0.0)
            up_grad = up_grad.where(whole_up.abs() <= ctx.limit, 0.0)
        return torch.cat((gate_grad, up_grad), dim=-1).to(x.dtype), None, None, None


def _limited(x: torch.Tensor, limit: float | None) -> tuple[torch.Tensor, torch.Tensor]:
    gate, up = x.to(arithmetic_dtype(x.dtype)).chunk(2, dim=-1)
    return (gate, up) if limit is None else (gate.clamp(max=limit), up.clamp(-limit, limit))


def _activated(gate: torch.Tensor, kind: str) -> torch.Tensor:
    if kind in _STEEPNESS:
        return gate * torch.sigmoid(_STEEPNESS[kind] * gate)
    return _GATES[kind](gate)


def _activated_grad(grad: torch.Tensor, gate: torch.Tensor, kind: str) -> torch.Tensor:
    if kind not in _STEEPNESS:
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            return torch.autograd.grad(_GATES[kind](leaf), leaf, grad)[0]
    steep = _STEEPNESS[kind] * gate
    share = torch.sigmoid(steep)
    return grad * share * (1.0 + steep * (1.0 - share))
