"""A branch added to the residual stream, and the norm of the sum: one read of both, one write of the sum and its norm.

Weight gradients are summed in two stages over a number of parts that does not depend on the device: the same numbers
on every GPU, and no atomic additions.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

MAX_WIDTH = 8192
"""Wider rows do not fit into the registers of one program."""
_MAX_PARTS = 512


@triton.jit
def _keeps(first_key, second_key, row, column, threshold):
    """Return which channels of a row dropout keeps, by the rule of `megatron.core.kernels.dropout`."""
    x = tl.load(first_key + row).to(tl.uint32) + (column + 1).to(tl.uint32) * 0x9E3779B1
    x ^= x >> 16
    x *= 0x21F0AAAD
    x ^= x >> 15
    x ^= tl.load(second_key + row).to(tl.uint32)
    x *= 0x735A2D97
    x ^= x >> 15
    return (x >> 8) >= threshold


@triton.jit
def forward_program(
    branch: tl.tensor,
    branch_bias: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    normalised: tl.tensor,
    means: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    weight_offset: tl.tensor,
    threshold: tl.tensor,
    kept_scale: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Write one row of the sum and of its norm. Without ``means`` the norm is RMSNorm, without keys all is kept."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(branch + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if branch_bias is not None:
        x += tl.load(branch_bias + column, mask=inside, other=0.0).to(tl.float32)
    if first_key is not None:
        x = tl.where(_keeps(first_key, second_key, row, column, threshold), x * kept_scale, 0.0)
    x += tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
    # What is normalised is the stream as it is stored.
    rounded = x.to(total.dtype.element_ty)
    tl.store(total + row * width + column, rounded, mask=inside)
    x = rounded.to(tl.float32)
    if means is not None:
        mean = tl.sum(x, axis=0) / width
        x = tl.where(inside, x - mean, 0.0)
        tl.store(means + row, mean)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) / width + epsilon)
    tl.store(scales + row, scale)
    x *= scale * (tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + weight_offset)
    if bias is not None:
        x += tl.load(bias + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(normalised + row * width + column, x.to(normalised.dtype.element_ty), mask=inside)


@triton.jit
def backward_program(
    normalised_grad: tl.tensor,
    total_grad: tl.tensor,
    total: tl.tensor,
    weight: tl.tensor,
    means: tl.tensor,
    scales: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    residual_grad: tl.tensor,
    branch_grad: tl.tensor,
    weight_parts: tl.tensor,
    bias_parts: tl.tensor,
    branch_bias_parts: tl.tensor,
    num_rows: tl.tensor,
    rows_per_part: tl.tensor,
    width: tl.tensor,
    weight_offset: tl.tensor,
    threshold: tl.tensor,
    kept_scale: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Write the gradients of some rows, and this program's part of the weight gradients."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    if bias_parts is not None:
        bias_sum = tl.zeros((BLOCK,), tl.float32)
    if branch_bias_parts is not None:
        branch_bias_sum = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * rows_per_part, tl.minimum((part + 1) * rows_per_part, num_rows)):
        at = row * width + column
        scale = tl.load(scales + row)
        x = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(normalised_grad + at, mask=inside, other=0.0).to(tl.float32)
        if means is not None:
            x -= tl.load(means + row)
        x *= scale
        weight_sum += grad * x
        if bias_parts is not None:
            bias_sum += grad
        grad *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + weight_offset
        # Outside the row grad is 0, and so is every product with it.
        x_grad = grad - x * (tl.sum(grad * x, axis=0) / width)
        if means is not None:
            x_grad -= tl.sum(grad, axis=0) / width
        x_grad = x_grad * scale + tl.load(total_grad + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_grad + at, x_grad.to(residual_grad.dtype.element_ty), mask=inside)
        if first_key is not None:
            x_grad = tl.where(_keeps(first_key, second_key, row, column, threshold), x_grad * kept_scale, 0.0)
            tl.store(branch_grad + at, x_grad.to(branch_grad.dtype.element_ty), mask=inside)
        if branch_bias_parts is not None:
            branch_bias_sum += x_grad
    tl.store(weight_parts + part * width + column, weight_sum, mask=inside)
    if bias_parts is not None:
        tl.store(bias_parts + part * width + column, bias_sum, mask=inside)
    if branch_bias_parts is not None:
        tl.store(branch_bias_parts + part * width + column, branch_bias_sum, mask=inside)


def warps(block: int) -> int:
    """Return the number of warps at which a thread holds eight channels."""
    return min(32, max(4, block // 256))


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        branch: torch.Tensor,
        branch_bias: torch.Tensor | None,
        residual: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        first_key: torch.Tensor | None,
        second_key: torch.Tensor | None,
        probability: float,
        epsilon: float,
        weight_offset: float,
        subtracts_mean: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        branch, residual = branch.contiguous(), residual.contiguous()
        width = branch.shape[-1]
        num_rows = branch.numel() // width
        total, normalised = torch.empty_like(residual), torch.empty_like(residual)
        scales = branch.new_empty(num_rows, dtype=torch.float32)
        means = torch.empty_like(scales) if subtracts_mean else None
        ctx.arguments = weight_offset, round(probability * 2**24), 1.0 / (1.0 - probability)
        block = triton.next_power_of_2(width)
        if num_rows:
            forward_program[(num_rows,)](
                branch, branch_bias, first_key, second_key, residual, weight, bias, total, normalised, means, scales,
                width, epsilon, *ctx.arguments, BLOCK=block, num_warps=warps(block),
            )  # fmt: skip
        ctx.save_for_backward(total, weight, means, scales, first_key, second_key)
        ctx.dtypes = tuple(None if x is None else x.dtype for x in (branch_bias, bias))
        return total, normalised

    @staticmethod
    def backward(ctx: Any, total_grad: torch.Tensor, normalised_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, weight, means, scales, first_key, second_key = ctx.saved_tensors
        width = total.shape[-1]
        num_rows = scales.shape[0]
        rows_per_part = max(1, triton.cdiv(num_rows, _MAX_PARTS))
        num_parts = triton.cdiv(num_rows, rows_per_part)
        parts = [
            None if dtype is None else total.new_empty((num_parts, width), dtype=torch.float32)
            for dtype in (weight.dtype, ctx.dtypes[1], ctx.dtypes[0])
        ]
        residual_grad = torch.empty_like(total)
        branch_grad = residual_grad if first_key is None else torch.empty_like(total)
        block = triton.next_power_of_2(width)
        if num_rows:
            backward_program[(num_parts,)](
                normalised_grad.contiguous(), total_grad.contiguous(), total, weight, means, scales,
                first_key, second_key, residual_grad, branch_grad, *parts, num_rows, rows_per_part, width,
                *ctx.arguments, BLOCK=block, num_warps=warps(block),
            )  # fmt: skip
        weight_grad, bias_grad, branch_bias_grad = (
            None if part is None else part.sum(0).to(dtype)
            for part, dtype in zip(parts, (weight.dtype, ctx.dtypes[1], ctx.dtypes[0]))
        )
        return branch_grad, branch_bias_grad, residual_grad, weight_grad, bias_grad, *(None,) * 6


def add_and_normalise(
    branch: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    subtracts_mean: bool,
    weight_offset: float = 0.0,
    branch_bias: torch.Tensor | None = None,
    keys: tuple[torch.Tensor, torch.Tensor] | None = None,
    probability: float = 0.0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``residual + dropout(branch + branch_bias)`` and its norm.

    The norm is LayerNorm where it ``subtracts_mean`` and RMSNorm elsewhere; ``weight_offset`` is added to its weight.
    ``keys`` are two for each row, which decide what dropout keeps of it; without them nothing is dropped.

    Shapes: ``branch, residual: [..., h]``, ``weight, bias, branch_bias: [h]``, ``keys: [...]`` twice in int32
    ``-> [..., h]`` twice.
    """
    first_key, second_key = (None, None) if keys is None else (key.contiguous() for key in keys)
    result: tuple[torch.Tensor, torch.Tensor] = _ResidualNorm.apply(
        branch,
        branch_bias,
        residual,
        weight,
        bias,
        first_key,
        second_key,
        probability,
        epsilon,
        weight_offset,
        subtracts_mean,
    )
    return result
