"""Triton kernels of the depthwise causal convolution.

The forward pass is one kernel. One backward kernel writes the gradient before SiLU and the gradients of the weights
summed over its positions, and one writes the gradient of the inputs. Partial sums are added in a fixed order, without
atomic additions, so that results are the same on every GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ROWS = 16
_COLUMNS = 64


@triton.jit
def _seen(x, state, visible, entry, row, column, batch, num_positions, channels, inside, SHIFT, WIDTH: tl.constexpr):
    """Return the inputs of some positions at one offset of their windows, 0 from other documents."""
    source = row - (WIDTH - 1 - SHIFT)
    is_input = inside & (source >= 0)[:, None]
    at = (entry * num_positions + source)[:, None] * channels + column[None, :]
    inputs = tl.load(x + at, mask=is_input, other=0.0).to(tl.float32)
    if SHIFT < WIDTH - 1:
        at = (entry * (WIDTH - 1) + row + SHIFT)[:, None] * channels + column[None, :]
        inputs += tl.load(state + at, mask=inside & (source < 0)[:, None], other=0.0)
        if visible is not None:
            at = (SHIFT * batch + entry) * (num_positions + 1) + row
            inputs *= tl.load(visible + at, mask=row < num_positions, other=0.0)[:, None]
    return inputs


@triton.jit
def _convolved(
    x, state, visible, weight, bias, entry, row, column, batch, num_positions, channels, inside, WIDTH: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Return the convolution at some positions, with the bias."""
    result = tl.zeros((ROWS, COLUMNS), tl.float32)
    if bias is not None:
        result += tl.load(bias + column, mask=column < channels, other=0.0)[None, :]
    for shift in tl.static_range(WIDTH):
        inputs = _seen(x, state, visible, entry, row, column, batch, num_positions, channels, inside, shift, WIDTH)
        result += inputs * tl.load(weight + shift * channels + column, mask=column < channels, other=0.0)[None, :]
    return result


@triton.jit
def forward_program(
    x: tl.tensor,
    state: tl.tensor,
    visible: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    output: tl.tensor,
    batch: tl.tensor,
    num_positions: tl.tensor,
    channels: tl.tensor,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write one tile of positions and channels of the output."""
    tile = tl.program_id(0).to(tl.int64)
    num_tiles = tl.cdiv(num_positions, ROWS)
    entry, row = tile // num_tiles, tile % num_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_positions)[:, None] & (column < channels)[None, :]
    result = _convolved(
        x, state, visible, weight, bias, entry, row, column, batch, num_positions, channels, inside, WIDTH, ROWS,
        COLUMNS,
    )  # fmt: skip
    if SILU:
        result *= tl.sigmoid(result)
    at = (entry * num_positions + row)[:, None] * channels + column[None, :]
    tl.store(output + at, result.to(output.dtype.element_ty), mask=inside)


@triton.jit
def weights_program(
    grad: tl.tensor,
    x: tl.tensor,
    state: tl.tensor,
    visible: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    sums_grad: tl.tensor,
    parts: tl.tensor,
    batch: tl.tensor,
    num_positions: tl.tensor,
    channels: tl.tensor,
    SILU: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write one tile of the gradient before SiLU, and this tile's part of the gradients of the weights and the bias."""
    tile = tl.program_id(0).to(tl.int64)
    num_tiles = tl.cdiv(num_positions, ROWS)
    entry, row = tile // num_tiles, tile % num_tiles * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_positions)[:, None] & (column < channels)[None, :]
    at = (entry * num_positions + row)[:, None] * channels + column[None, :]
    result_grad = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    if SILU:
        result = _convolved(
            x, state, visible, weight, bias, entry, row, column, batch, num_positions, channels, inside, WIDTH, ROWS,
            COLUMNS,
        )  # fmt: skip
        share = tl.sigmoid(result)
        result_grad *= share * (1.0 + result * (1.0 - share))
        tl.store(sums_grad + at, result_grad, mask=inside)
    parts += tile * (WIDTH + 1) * channels + column
    for shift in tl.static_range(WIDTH):
        inputs = _seen(x, state, visible, entry, row, column, batch, num_positions, channels, inside, shift, WIDTH)
        tl.store(parts + shift * channels, tl.sum(result_grad * inputs, axis=0), mask=column < channels)
    tl.store(parts + WIDTH * channels, tl.sum(result_grad, axis=0), mask=column < channels)


@triton.jit
def inputs_program(
    sums_grad: tl.tensor,
    last_state_grad: tl.tensor,
    visible: tl.tensor,
    weight: tl.tensor,
    x_grad: tl.tensor,
    state_grad: tl.tensor,
    batch: tl.tensor,
    num_positions: tl.tensor,
    channels: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Write one tile of the gradients of the inputs, the initial state included, which precedes the first position."""
    tile = tl.program_id(0).to(tl.int64)
    num_tiles = tl.cdiv(num_positions + WIDTH - 1, ROWS)
    entry, row = tile // num_tiles, tile % num_tiles * ROWS + tl.arange(0, ROWS) - (WIDTH - 1)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row < num_positions)[:, None] & (column < channels)[None, :]
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for shift in tl.static_range(WIDTH):
        target = row + (WIDTH - 1 - shift)
        at = (entry * num_positions + target)[:, None] * channels + column[None, :]
        is_seen = inside & ((target >= 0) & (target < num_positions))[:, None]
        added = tl.load(sums_grad + at, mask=is_seen, other=0.0).to(tl.float32)
        added *= tl.load(weight + shift * channels + column, mask=column < channels, other=0.0)[None, :]
        if shift < WIDTH - 1:
            if last_state_grad is not None:
                # The window after the last position is the last state.
                at = (entry * (WIDTH - 1) + shift) * channels + column[None, :]
                added += tl.load(last_state_grad + at, mask=inside & (target == num_positions)[:, None], other=0.0)
            if visible is not None:
                at = (shift * batch + entry) * (num_positions + 1) + target
                is_target = (target >= 0) & (target <= num_positions)
                added *= tl.load(visible + at, mask=is_target, other=0.0)[:, None]
        total += added
    at = (entry * num_positions + row)[:, None] * channels + column[None, :]
    tl.store(x_grad + at, total.to(x_grad.dtype.element_ty), mask=inside & (row >= 0)[:, None])
    at = (entry * (WIDTH - 1) + row + WIDTH - 1)[:, None] * channels + column[None, :]
    tl.store(state_grad + at, total, mask=inside & (row < 0)[:, None])


def convolve(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    visible: torch.Tensor | None,
    silu: bool,
) -> torch.Tensor:
    """Return the causal convolution of ``x``; see `megatron.core.ops.linear_attention.causal_convolution`.

    Shapes, in float32 but for ``x`` and the result: ``x: [b, s, c], weight: [width, c], bias: [c], state: [b, width -
    1, c], visible: [width - 1, b, s + 1, 1] -> [b, s, c]``.
    """
    x = x.contiguous()
    output = torch.empty_like(x)
    batch, num_positions, channels = x.shape
    if x.numel():
        forward_program[batch * triton.cdiv(num_positions, _ROWS), triton.cdiv(channels, _COLUMNS)](
            x, state, visible, weight, bias, output, batch, num_positions, channels,
            SILU=silu, WIDTH=weight.shape[0], ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip
    return output


def convolution_gradients(
    grad: torch.Tensor,
    last_state_grad: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    state: torch.Tensor,
    visible: torch.Tensor | None,
    silu: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of ``x``, ``weight``, the bias and ``state`` of `convolve`, all but the first in float32.

    Shapes: as in `convolve`; ``last_state_grad: [b, width - 1, c]`` in float32.
    """
    x, grad = x.contiguous(), grad.contiguous()
    last_state_grad = None if last_state_grad is None else last_state_grad.contiguous()
    batch, num_positions, channels = x.shape
    width, num_columns = weight.shape[0], triton.cdiv(channels, _COLUMNS)
    num_tiles = batch * triton.cdiv(num_positions, _ROWS)
    x_grad, sums_grad = torch.empty_like(x), torch.empty_like(x, dtype=torch.float32) if silu else grad
    state_grad = torch.empty_like(state)
    parts = weight.new_empty(num_tiles, width + 1, channels)
    if x.numel():
        weights_program[num_tiles, num_columns](
            grad, x, state, visible, weight, bias, sums_grad, parts, batch, num_positions, channels,
            SILU=silu, WIDTH=width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip
        inputs_program[batch * triton.cdiv(num_positions + width - 1, _ROWS), num_columns](
            sums_grad, last_state_grad, visible, weight, x_grad, state_grad, batch, num_positions, channels,
            WIDTH=width, ROWS=_ROWS, COLUMNS=_COLUMNS, num_warps=4,
        )  # fmt: skip
    totals = parts.sum(dim=0)
    return x_grad, totals[:-1], totals[-1], state_grad
