"""Triton kernels of Mamba-2's gated norm: RMSNorm over the channels of each group after or before a gate with SiLU.

Forward is one kernel, and backward is one that writes both gradients and partial sums of the gradient of the weight.
These are added in a fixed order, without atomic additions, so that results are the same on every GPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

MAX_GROUP_WIDTH = 8192
"""Wider groups do not fit into the registers of one program."""
_MAX_PARTS = 256


@triton.jit
def forward_program(
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    output: tl.tensor,
    scales: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    gate_batch: tl.tensor,
    gate_row: tl.tensor,
    output_batch: tl.tensor,
    output_row: tl.tensor,
    num_positions: tl.tensor,
    width: tl.tensor,
    epsilon: tl.tensor,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one group of one position; without a weight, only the gate is applied."""
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    entry, position = row // num_positions, row % num_positions
    column = tl.arange(0, BLOCK)
    inside = column < width
    column += group * width
    value = tl.load(x + entry * x_batch + position * x_row + column, mask=inside, other=0.0).to(tl.float32)
    opened = tl.load(gate + entry * gate_batch + position * gate_row + column, mask=inside, other=0.0).to(tl.float32)
    opened *= tl.sigmoid(opened)
    if GATE_FIRST:
        value *= opened
    if weight is not None:
        scale = tl.rsqrt(tl.sum(value * value, axis=0) / width + epsilon)
        tl.store(scales + row * tl.num_programs(1) + group, scale)
        value *= scale * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    if not GATE_FIRST:
        value *= opened
    output += entry * output_batch + position * output_row
    tl.store(output + column, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def backward_program(
    grad: tl.tensor,
    x: tl.tensor,
    gate: tl.tensor,
    weight: tl.tensor,
    scales: tl.tensor,
    x_grad: tl.tensor,
    gate_grad: tl.tensor,
    weight_parts: tl.tensor,
    grad_batch: tl.tensor,
    grad_row: tl.tensor,
    x_batch: tl.tensor,
    x_row: tl.tensor,
    gate_batch: tl.tensor,
    gate_row: tl.tensor,
    num_rows: tl.tensor,
    rows_per_part: tl.tensor,
    num_positions: tl.tensor,
    width: tl.tensor,
    GATE_FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradients of one group of some positions, and their part of the gradient of the weight."""
    part, group, num_groups = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.num_programs(1)
    column = tl.arange(0, BLOCK)
    inside = column < width
    column += group * width
    weight_sum = tl.zeros((BLOCK,), tl.float32)
    for row in range(part * rows_per_part, tl.minimum((part + 1) * rows_per_part, num_rows)):
        entry, position = row // num_positions, row % num_positions
        value = tl.load(x + entry * x_batch + position * x_row + column, mask=inside, other=0.0).to(tl.float32)
        closed = tl.load(gate + entry * gate_batch + position * gate_row + column, mask=inside, other=0.0)
        closed = closed.to(tl.float32)
        share = tl.sigmoid(closed)
        opened = closed * share
        at = entry * grad_batch + position * grad_row + column
        value_grad = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        normalized = value
        if GATE_FIRST:
            normalized = value * opened
        if weight is not None:
            scale = tl.load(scales + row * num_groups + group)
            normalized *= scale
            factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
            if not GATE_FIRST:
                opened_grad = value_grad * normalized * factor
                value_grad *= opened
            weight_sum += value_grad * normalized
            value_grad *= factor
            # Outside the group the gradient is 0, and so are all products with it.
            value_grad -= normalized * (tl.sum(value_grad * normalized, axis=0) / width)
            value_grad *= scale
        if GATE_FIRST:
            opened_grad = value_grad * value
            value_grad *= opened
        at = row * width * num_groups + column
        tl.store(x_grad + at, value_grad.to(x_grad.dtype.element_ty), mask=inside)
        opened_grad *= share * (1.0 + closed * (1.0 - share))
        tl.store(gate_grad + at, opened_grad.to(gate_grad.dtype.element_ty), mask=inside)
    if weight is not None:
        tl.store(weight_parts + part * width * num_groups + column, weight_sum, mask=inside)


def warps(block: int) -> int:
    return min(32, max(4, block // 256))


def _dense_rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x: [b, s, inner]``, or a copy, with contiguous channels."""
    return x if x.stride(-1) == 1 else x.contiguous()


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        gate: torch.Tensor,
        weight: torch.Tensor | None,
        num_groups: int,
        epsilon: float,
        gate_first: bool,
    ) -> torch.Tensor:
        x, gate = _dense_rows(x), _dense_rows(gate)
        batch, num_positions, inner = x.shape
        width = inner // num_groups
        # The projection that follows takes the positions first.
        output = x.new_empty(num_positions, batch, inner).transpose(0, 1)
        scales = x.new_empty(batch, num_positions, num_groups, dtype=torch.float32)
        ctx.launch = {"GATE_FIRST": gate_first, "BLOCK": triton.next_power_of_2(width)}
        ctx.launch["num_warps"] = warps(ctx.launch["BLOCK"])
        if x.numel():
            forward_program[batch * num_positions, num_groups](
                x, gate, weight, output, scales, *x.stride()[:2], *gate.stride()[:2], *output.stride()[:2],
                num_positions, width, epsilon, **ctx.launch,
            )  # fmt: skip
        ctx.save_for_backward(x, gate, weight, scales)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, gate, weight, scales = ctx.saved_tensors
        grad = _dense_rows(grad)
        batch, num_positions, num_groups = scales.shape
        num_rows, inner = batch * num_positions, x.shape[-1]
        rows_per_part = max(1, triton.cdiv(num_rows, _MAX_PARTS))
        num_parts = triton.cdiv(num_rows, rows_per_part)
        x_grad, gate_grad = (torch.empty_like(each, memory_format=torch.contiguous_format) for each in (x, gate))
        parts = None if weight is None else scales.new_empty(num_parts, inner)
        if x.numel():
            backward_program[num_parts, num_groups](
                grad, x, gate, weight, scales, x_grad, gate_grad, parts, *grad.stride()[:2], *x.stride()[:2],
                *gate.stride()[:2], num_rows, rows_per_part, num_positions, inner // num_groups, **ctx.launch,
            )  # fmt: skip
        weight_grad = None if parts is None or weight is None else parts.sum(dim=0).to(weight.dtype)
        return x_grad, gate_grad, weight_grad, None, None, None


def gate_and_normalize(
    x: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None,
    num_groups: int,
    epsilon: float,
    *,
    gate_first: bool,
) -> torch.Tensor:
    """Return the norm of ``x * silu(gate)``, or with ``gate_first=False`` the norm of ``x`` times ``silu(gate)``.

    It is RMSNorm of each of ``num_groups`` groups of channels, times ``weight``. Without a weight it is left out.

    Shapes: ``x, gate: [b, s, inner], weight: [inner] -> [b, s, inner]``.
    """
    output: torch.Tensor = _GatedNorm.apply(x, gate, weight, num_groups, epsilon, gate_first)
    return output
