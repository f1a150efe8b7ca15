"""Triton kernels that quantize the gradient of a gated activation's input, and the activation, in groups of rows.

The kernels compute the numbers that the backward kernel of `megatron.core.ops.triton.activation` would write, rounded
to the dtype of the input, and quantize them like `megatron.core.ops.triton.fp8_group_cast`. One kernel finds the
largest absolute values, and a second one writes E4M3: both read the activation's input and the gradient of its output.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.triton.activation import GATED_KINDS, rounded_gradients
from megatron.core.ops.triton.fp8_group_cast import GRAIN, write_rows, write_transpose
from megatron.core.ops.triton.fp8_scaled_cast import Part, _absolute_bits, scales_of

_BLOCK = 128
_AMAX_WARPS, _ROWS_WARPS = 8, 4


@triton.jit
def _gradients(
    grad,
    x,
    choices,
    num_choices,
    group,
    num_groups,
    width,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a tile of the gradients of both halves of ``x``, and of the activation, in float32.

    Rows without a choice, and those after the last group, are zero.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = (group < num_groups) & (tl.load(choices + row) < num_choices)
    inside = exists[:, None] & (column < width)[None, :]
    place = x + row[:, None] * (2 * width) + column[None, :]
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
    out = tl.load(grad + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    return rounded_gradients(out, gate, up, x.dtype.element_ty, KIND)


@triton.jit
def gradient_amax_program(
    grad: tl.tensor,
    x: tl.tensor,
    choices: tl.tensor,
    group_of: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    activated_columns: tl.tensor,
    num_choices: tl.tensor,
    num_groups: tl.tensor,
    width: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise ``rows``, ``columns`` and ``activated_columns`` to the bits of the largest absolute values.

    Shapes: ``rows: [n]``, ``columns: [groups, 2 * width]``, ``activated_columns: [groups, width]``.
    """
    group = tl.load(group_of + tl.program_id(0)).to(tl.int64)
    gate, up, activated = _gradients(grad, x, choices, num_choices, group, num_groups, width, KIND, ROWS, BLOCK)
    gate, up = _absolute_bits(gate), _absolute_bits(up)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (column < width) & (group < num_groups)
    if rows is not None:
        tl.atomic_max(rows + row, tl.max(tl.maximum(gate, up), axis=1), sem="relaxed")
    if columns is not None:
        place = columns + group * (2 * width) + column
        tl.atomic_max(place, tl.max(gate, axis=0), mask=inside, sem="relaxed")
        tl.atomic_max(place + width, tl.max(up, axis=0), mask=inside, sem="relaxed")
    if activated_columns is not None:
        bits = tl.max(_absolute_bits(activated), axis=0)
        tl.atomic_max(activated_columns + group * width + column, bits, mask=inside, sem="relaxed")


@triton.jit
def gradient_rows_program(
    grad: tl.tensor,
    x: tl.tensor,
    choices: tl.tensor,
    group_of: tl.tensor,
    row_amax: tl.tensor,
    column_amax: tl.tensor,
    activated_amax: tl.tensor,
    data: tl.tensor,
    turned: tl.tensor,
    activated_turned: tl.tensor,
    num_choices: tl.tensor,
    num_groups: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write two tiles of ``data`` and of ``turned``, and one of ``activated_turned``, in E4M3.

    Shapes: ``data: [num_rows, 2 * width]``, ``turned: [2 * width, num_rows]``, ``activated_turned: [width, num_rows]``.
    """
    group = tl.load(group_of + tl.program_id(0)).to(tl.int64)
    gate, up, activated = _gradients(grad, x, choices, num_choices, group, num_groups, width, KIND, ROWS, BLOCK)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside, has_group = column < width, group < num_groups
    if data is not None:
        write_rows(gate, row_amax, data, row, column, is_inside, 2 * width)
        write_rows(up, row_amax, data, row, column + width, is_inside, 2 * width)
    if turned is not None:
        amax = column_amax + group * (2 * width)
        write_transpose(gate, amax, turned, row, column, is_inside, has_group, num_rows)
        write_transpose(up, amax, turned, row, column + width, is_inside, has_group, num_rows)
    if activated_turned is not None:
        amax = activated_amax + group * width
        write_transpose(activated, amax, activated_turned, row, column, is_inside, has_group, num_rows)


def cast_gated_gradients(
    grad: torch.Tensor,
    x: torch.Tensor,
    choices: torch.Tensor,
    num_choices: int,
    group_of: torch.Tensor,
    num_groups: int,
    kind: str,
    *,
    plain: bool,
    transpose: bool,
    activated: bool,
) -> tuple[Part | None, Part | None, Part | None]:
    """Quantize the gradient of a gated activation's input to E4M3, and the transposes of it and of the activation.

    Both matrices are contiguous. ``kind`` is one of `GATED_KINDS`. The other arguments are those of `cast_groups`.

    Shapes: ``grad: [n, width]``, ``x: [n, 2 * width] -> ([n, 2 * width], [n])``, ``([2 * width, n], [groups,
    2 * width])``, ``([width, n], [groups, width])``.
    """
    assert kind in GATED_KINDS, kind
    num_rows, width = grad.shape
    sizes = [num_rows * plain, num_groups * 2 * width * transpose, num_groups * width * activated]
    amax = torch.zeros(sum(sizes), dtype=torch.int32, device=x.device)
    found = [part if size else None for part, size in zip(amax.split(sizes), sizes)]
    given, grid = (grad, x, choices, group_of), (len(group_of), triton.cdiv(width, _BLOCK))
    sizes_of_tile = {"KIND": kind, "ROWS": GRAIN, "BLOCK": _BLOCK}
    gradient_amax_program[grid](*given, *found, num_choices, num_groups, width, **sizes_of_tile, num_warps=_AMAX_WARPS)
    shapes = (num_rows, 2 * width), (2 * width, num_rows), (width, num_rows)
    written = [
        torch.empty(shape, dtype=torch.uint8, device=x.device) if size else None for shape, size in zip(shapes, sizes)
    ]
    gradient_rows_program[grid](
        *given, *found, *written, num_choices, num_groups, num_rows, width, **sizes_of_tile, num_warps=_ROWS_WARPS
    )
    scales = scales_of(amax.view(torch.float32), torch.float8_e4m3fn).split(sizes)
    of_shape = scales[0], scales[1].view(-1, 2 * width), scales[2].view(-1, width)
    first, second, third = (
        None if data is None else (data.view(torch.float8_e4m3fn), scale) for data, scale in zip(written, of_shape)
    )
    return first, second, third
