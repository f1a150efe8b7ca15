"""Triton kernels of the residual stream: keyed dropout of a branch, residual addition, and the norm of the sum.

Dropout and addition are one kernel. With the norm, one kernel reads both inputs and writes the sum and its norm. Weight
gradients are summed in two stages with a number of partial sums that does not depend on the device and without atomic
additions, so that results are the same on every GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from megatron.core.main_grad import Receiver, leave_parts, receive_parts

_BLOCK = 1024


@triton.jit
def keeps(first_key, second_key, row, column, threshold):
    """Return which columns of a row dropout keeps, by the rule of `megatron.core.ops.dropout`."""
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
    """Write one block of a row of ``x`` after dropout, added to ``residual`` if given."""
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
    """Return the smallest hash that is kept, and the scale of kept elements."""
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
    """Triton version of the torch function of the same name."""
    first_key, second_key = (key.contiguous() for key in keys)
    result: torch.Tensor = _Dropout.apply(x, residual, first_key, second_key, probability)
    return result


MAX_WIDTH = 8192
"""Wider rows do not fit into the registers of one program."""
_MAX_PARTS = 512
_MAX_SUMMED_WIDTH = 4096
"""Wider rows leave no registers for a third sum."""


@triton.jit
def forward_program(
    branch: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    total: tl.tensor,
    normalized: tl.tensor,
    means: tl.tensor,
    scales: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    weight_offset: tl.tensor,
    threshold: tl.tensor,
    kept_scale: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Write one row of the residual sum and of its normalized value.

    Without ``means`` the norm is RMSNorm, without keys there is no dropout, and without a branch the sum is the
    residual.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    x = tl.load(residual + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if branch is not None:
        added = tl.load(branch + row * width + column, mask=inside, other=0.0).to(tl.float32)
        if first_key is not None:
            added = tl.where(keeps(first_key, second_key, row, column, threshold), added * kept_scale, 0.0)
        # Normalize the stream as stored, after rounding.
        rounded = (x + added).to(total.dtype.element_ty)
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
    tl.store(normalized + row * width + column, x.to(normalized.dtype.element_ty), mask=inside)


@triton.jit
def backward_program(
    normalized_grad: tl.tensor,
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
    branch_parts: tl.tensor,
    num_rows: tl.tensor,
    rows_per_part: tl.tensor,
    width: tl.tensor,
    weight_offset: tl.tensor,
    threshold: tl.tensor,
    kept_scale: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Write the gradients of some rows, and this program's partial sums of the weight gradients."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    if bias_parts is not None:
        bias_sum = tl.zeros((BLOCK,), tl.float32)
    if branch_parts is not None:
        branch_sum = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * rows_per_part, tl.minimum((part + 1) * rows_per_part, num_rows)):
        at = row * width + column
        scale = tl.load(scales + row)
        x = tl.load(total + at, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(normalized_grad + at, mask=inside, other=0.0).to(tl.float32)
        if means is not None:
            x -= tl.load(means + row)
        x *= scale
        weight_sum += grad * x
        if bias_parts is not None:
            bias_sum += grad
        grad *= tl.load(weight + column, mask=inside, other=0.0).to(tl.float32) + weight_offset
        # Outside the row grad is 0, and so are all products with it.
        x_grad = grad - x * (tl.sum(grad * x, axis=0) / width)
        if means is not None:
            x_grad -= tl.sum(grad, axis=0) / width
        x_grad = x_grad * scale + tl.load(total_grad + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(residual_grad + at, x_grad.to(residual_grad.dtype.element_ty), mask=inside)
        if first_key is not None:
            x_grad = tl.where(keeps(first_key, second_key, row, column, threshold), x_grad * kept_scale, 0.0)
            tl.store(branch_grad + at, x_grad.to(branch_grad.dtype.element_ty), mask=inside)
        if branch_parts is not None:
            branch_sum += tl.where(inside, x_grad, 0.0)
    tl.store(weight_parts + part * width + column, weight_sum, mask=inside)
    if bias_parts is not None:
        tl.store(bias_parts + part * width + column, bias_sum, mask=inside)
    if branch_parts is not None:
        tl.store(branch_parts + part * width + column, branch_sum, mask=inside)


def warps(block: int) -> int:
    return min(32, max(4, block // 256))


class _ResidualNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        residual: torch.Tensor,
        branch: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        first_key: torch.Tensor | None,
        second_key: torch.Tensor | None,
        probability: float,
        epsilon: float,
        weight_offset: float,
        subtracts_mean: bool,
        sums_branch_grad: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = residual.contiguous()
        branch = None if branch is None else branch.contiguous()
        width = stream.shape[-1]
        num_rows = stream.numel() // width
        total = stream if branch is None else torch.empty_like(stream)
        normalized = torch.empty_like(stream)
        scales = stream.new_empty(num_rows, dtype=torch.float32)
        means = torch.empty_like(scales) if subtracts_mean else None
        ctx.arguments = weight_offset, *threshold_and_scale(probability)
        block = triton.next_power_of_2(width)
        if num_rows:
            forward_program[(num_rows,)](
                branch, first_key, second_key, stream, weight, bias, total, normalized, means, scales,
                width, epsilon, *ctx.arguments, BLOCK=block, num_warps=warps(block),
            )  # fmt: skip
        ctx.save_for_backward(total, weight, means, scales, first_key, second_key)
        ctx.has_branch = branch is not None
        ctx.sums_branch_grad = branch is not None and sums_branch_grad and width <= _MAX_SUMMED_WIDTH
        ctx.receivers = [Receiver.of(each) for each in (weight, bias) if each is not None]
        return residual if branch is None else total, normalized

    @staticmethod
    def backward(ctx: Any, total_grad: torch.Tensor, normalized_grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        total, weight, means, scales, first_key, second_key = ctx.saved_tensors
        width = total.shape[-1]
        num_rows = scales.shape[0]
        rows_per_part = max(1, triton.cdiv(num_rows, _MAX_PARTS))
        num_parts = triton.cdiv(num_rows, rows_per_part)
        receivers: list[Receiver] = ctx.receivers
        parts = total.new_empty((len(receivers), num_parts, width), dtype=torch.float32)
        bias_parts = parts[1] if len(receivers) > 1 else None
        branch_parts = parts.new_empty((1, num_parts, width)) if ctx.sums_branch_grad else None
        residual_grad = torch.empty_like(total)
        branch_grad = residual_grad if first_key is None else torch.empty_like(total)
        block = triton.next_power_of_2(width)
        if num_rows:
            backward_program[(num_parts,)](
                normalized_grad.contiguous(), total_grad.contiguous(), total, weight, means, scales,
                first_key, second_key, residual_grad, branch_grad, parts[0], bias_parts, branch_parts,
                num_rows, rows_per_part, width, *ctx.arguments, BLOCK=block, num_warps=warps(block),
            )  # fmt: skip
        if branch_parts is not None:
            leave_parts(branch_grad, branch_parts)
        grads = (*receive_parts(parts, receivers), None)[:2]
        return residual_grad, branch_grad if ctx.has_branch else None, *grads, *(None,) * 7


def add_and_normalize(
    residual: torch.Tensor,
    branch: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    epsilon: float,
    *,
    subtracts_mean: bool,
    weight_offset: float = 0.0,
    keys: tuple[torch.Tensor, torch.Tensor] | None = None,
    probability: float = 0.0,
    sums_branch_grad: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``residual + dropout(branch)`` and its norm; without a branch the residual itself and its norm.

    The norm is LayerNorm if it ``subtracts_mean``, else RMSNorm. ``weight_offset`` is added to its weight. ``keys`` are
    two keys per row that determine the dropout mask. Without them there is no dropout. With ``sums_branch_grad`` the
    kernel also sums the branch's gradient over rows, as the gradient of a final bias in the branch, unless the rows are
    too wide.

    Shapes: ``residual, branch: [..., h]``, ``weight, bias: [h]``, ``keys: [...]`` twice in int32 ``-> [..., h]`` twice.
    """
    first_key, second_key = (None, None) if keys is None else (key.contiguous() for key in keys)
    result: tuple[torch.Tensor, torch.Tensor] = _ResidualNorm.apply(
        *(residual, branch, weight, bias, first_key, second_key, probability, epsilon, weight_offset, subtracts_mean),
        sums_branch_grad,
    )
    return result
