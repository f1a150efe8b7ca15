"""Keyed dropout of rows, and the sum with the residual stream: ``[..., h] -> [..., h]`` in one pass."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def keeps(first_key, second_key, row, column, threshold):
    """Return which columns of a row dropout keeps, by the rule of `megatron.core.kernels.dropout`."""
    x = tl.load(first_key + row).to(tl.uint32) + (column + 1).to(tl.uint32) * 0x9E3779B1
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x ^= tl.load(second_key + row).to(tl.uint32)
    x *= 0x735A2D97
    x ^= x >> 15
    return (x >> 8) >= threshold


@triton.jit
def dropout_program(
    x: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    residual: tl.tensor,
    result: tl.tensor,
    width: tl.tensor,
    threshold: tl.tensor,
    kept_scale: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Write one block of a row of what dropout leaves of ``x``, added to the ``residual`` where there is one."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at = row * width + column
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.where(keeps(first_key, second_key, row, column, threshold), y * kept_scale, 0.0)
    if residual is not None:
        y += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(result + at, y.to(result.dtype.element_ty), mask=inside)


def threshold_and_scale(probability: float) -> tuple[int, float]:
    """Return the smallest hash that is kept, and the factor of what is kept."""
    return round(probability * 2**24), 1.0 / (1.0 - probability)


def _launch(
    x: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor], residual: torch.Tensor | None, probability: float
) -> torch.Tensor:
    x = x.contiguous()
    residual = None if residual is None else residual.contiguous()
    result = torch.empty_like(x)
    if x.numel():
        width = x.shape[-1]
        dropout_program[(x.numel() // width, triton.cdiv(width, _BLOCK))](
            x, *keys, residual, result, width, *threshold_and_scale(probability), BLOCK=_BLOCK, num_warps=4
        )
    return result


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        first_key: torch.Tensor,
        second_key: torch.Tensor,
        probability: float,
    ) -> torch.Tensor:
        ctx.save_for_backward(first_key, second_key)
        ctx.probability, ctx.has_residual = probability, residual is not None
        return _launch(x, (first_key, second_key), residual, probability)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_grad = _launch(grad, ctx.saved_tensors, None, ctx.probability)
        return x_grad, grad if ctx.has_residual else None, None, None, None


def drop_hidden(
    x: torch.Tensor, keys: tuple[torch.Tensor, torch.Tensor], probability: float, residual: torch.Tensor | None
) -> torch.Tensor:
    """Do what the torch twin of the same name does."""
    first_key, second_key = (key.contiguous() for key in keys)
    result: torch.Tensor = _Dropout.apply(x, residual, first_key, second_key, probability)
    return result
