"""Triton kernels that quantize groups of rows to FP8, and their transposes, with a scale per row.

A row of a transpose is a column of one group. Groups start at multiples of `GRAIN` rows, so that a block of this many
rows is of one group. All numbers are bit for bit equal to `megatron.core.ops.fp8_groups`, except that a gated
activation, which the kernels also compute, is rounded as by the kernels of `megatron.core.ops.triton.activation`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.triton.activation import GATED_KINDS, activation_and_slope
from megatron.core.ops.triton.fp8_cast import _float8_bits
from megatron.core.ops.triton.fp8_scaled_cast import (
    Part,
    _absolute_bits,
    _exponents,
    _inverse_powers,
    _powers,
    scales_of,
)

GRAIN = 16
_BLOCK = 256
_WARPS = 8
_WHOLE_ROW, _WHOLE_ROWS = 4096, 2
"""Elements of the longest row that one instance holds, and its number of rows."""


@triton.jit
def _values(
    x,
    choices,
    weights,
    per_token,
    num_choices,
    group,
    num_groups,
    width,
    IS_PADDED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Return a tile in float32; rows without a choice, and those after the last group, are zero.

    With a ``KIND`` it is a tile of this gated activation of ``x: [m, 2 * width]``, and with ``weights`` rows are
    multiplied by those of their choices. Either is rounded to the dtype of ``x``.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = row
    exists = row >= 0
    if choices is not None:
        choice = tl.load(choices + row)
        exists = choice < num_choices
        if not IS_PADDED:
            there = choice // per_token
    inside = ((group < num_groups) & exists)[:, None] & (column < width)[None, :]
    if KIND is None:
        values = tl.load(x + there[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    else:
        place = x + there[:, None] * (2 * width) + column[None, :]
        gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(place + width, mask=inside, other=0.0).to(tl.float32)
        activated, _ = activation_and_slope(gate, KIND)
        values = (activated * up).to(x.dtype.element_ty).to(tl.float32)
    if weights is not None:
        weight = tl.load(weights + choice, mask=exists, other=0.0).to(tl.float32)
        values = (values * weight[:, None]).to(x.dtype.element_ty).to(tl.float32)
    return values


@triton.jit
def write_rows(values, amax, data, row, column, is_inside, width):
    """Write a tile of ``data: [n, width]`` in E4M3 by the largest absolute values of its rows."""
    exponents = _exponents(tl.load(amax + row), False)
    bits = _float8_bits(values * _inverse_powers(exponents)[:, None], False)
    tl.store(data + row[:, None] * width + column[None, :], bits, mask=is_inside[None, :])


@triton.jit
def write_transpose(values, amax, turned, row, column, is_inside, has_group, num_rows):
    """Write a tile of ``turned: [width, num_rows]`` in E4M3 by the largest absolute values of the group's columns."""
    exponents = _exponents(tl.load(amax + column, mask=is_inside & has_group, other=0), False)
    bits = _float8_bits(values * _inverse_powers(exponents)[None, :], False)
    tl.store(turned + column[:, None] * num_rows + row[None, :], tl.trans(bits), mask=is_inside[:, None])


@triton.jit
def group_amax_program(
    x: tl.tensor,
    choices: tl.tensor,
    weights: tl.tensor,
    group_of: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    per_token: tl.tensor,
    num_choices: tl.tensor,
    num_groups: tl.tensor,
    width: tl.tensor,
    IS_PADDED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise ``rows: [n]`` and ``columns: [groups, width]`` to the bits of the largest absolute values."""
    group = tl.load(group_of + tl.program_id(0)).to(tl.int64)
    values = _values(
        x, choices, weights, per_token, num_choices, group, num_groups, width, IS_PADDED, KIND, ROWS, BLOCK
    )
    bits = _absolute_bits(values)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if rows is not None:
        tl.atomic_max(rows + row, tl.max(bits, axis=1), sem="relaxed")
    if columns is not None:
        inside = (column < width) & (group < num_groups)
        tl.atomic_max(columns + group * width + column, tl.max(bits, axis=0), mask=inside, sem="relaxed")


@triton.jit
def group_rows_program(
    x: tl.tensor,
    choices: tl.tensor,
    weights: tl.tensor,
    group_of: tl.tensor,
    row_amax: tl.tensor,
    column_amax: tl.tensor,
    data: tl.tensor,
    turned: tl.tensor,
    per_token: tl.tensor,
    num_choices: tl.tensor,
    num_groups: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    IS_PADDED: tl.constexpr,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one tile of ``data: [num_rows, width]`` and of ``turned: [width, num_rows]`` in E4M3."""
    group = tl.load(group_of + tl.program_id(0)).to(tl.int64)
    values = _values(
        x, choices, weights, per_token, num_choices, group, num_groups, width, IS_PADDED, KIND, ROWS, BLOCK
    )
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_inside = column < width
    if data is not None:
        write_rows(values, row_amax, data, row, column, is_inside, width)
    if turned is not None:
        write_transpose(
            values, column_amax + group * width, turned, row, column, is_inside, group < num_groups, num_rows
        )


@triton.jit
def whole_rows_program(
    x: tl.tensor,
    choices: tl.tensor,
    weights: tl.tensor,
    group_of: tl.tensor,
    scale: tl.tensor,
    data: tl.tensor,
    per_token: tl.tensor,
    num_choices: tl.tensor,
    num_groups: tl.tensor,
    width: tl.tensor,
    IS_PADDED: tl.constexpr,
    KIND: tl.constexpr,
    GRAIN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write some whole rows of ``data: [n, width]`` in E4M3, and their scales."""
    group = tl.load(group_of + tl.program_id(0) * ROWS // GRAIN).to(tl.int64)
    values = _values(
        x, choices, weights, per_token, num_choices, group, num_groups, width, IS_PADDED, KIND, ROWS, BLOCK
    )
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)
    exponents = _exponents(tl.max(_absolute_bits(values), axis=1), False)
    tl.store(scale + row, _powers(exponents))
    bits = _float8_bits(values * _inverse_powers(exponents)[:, None], False)
    tl.store(data + row[:, None] * width + column[None, :], bits, mask=(column < width)[None, :])


def cast_groups(
    x: torch.Tensor,
    choices: torch.Tensor | None,
    per_token: int,
    num_choices: int,
    group_of: torch.Tensor,
    num_groups: int,
    *,
    is_padded: bool,
    kind: str | None = None,
    weights: torch.Tensor | None = None,
    plain: bool,
    transpose: bool,
) -> tuple[Part | None, Part | None]:
    """Quantize groups of rows of a contiguous matrix to E4M3, the transposes by their own rows, or both.

    ``choices`` has the choice of each row of the result, and a row of ``x`` is a token with ``per_token`` choices. The
    choice ``num_choices`` or more means zeros. With ``is_padded`` the rows of ``x`` are those of the result.
    ``group_of`` has the group of each `GRAIN` rows, which is ``num_groups`` after the last group. With a ``kind`` this
    gated activation of ``x`` is quantized, and with ``weights`` of the choices each row is multiplied by its weight
    first. Rows without transposes are read once, if one instance can hold a row.

    Shapes: ``x: [m, width]``, or with a kind ``[m, 2 * width]``, ``choices: [n]``, ``group_of: [n / GRAIN] ->
    ([n, width], [n]), ([width, n], [groups, width])``.
    """
    assert kind is None or kind in GATED_KINDS, kind
    num_rows, width = len(group_of) * GRAIN, x.shape[1] // (1 if kind is None else 2)
    if not transpose and width <= _WHOLE_ROW:
        rows = torch.empty(num_rows, width, dtype=torch.uint8, device=x.device)
        scales = torch.empty(num_rows, device=x.device)
        whole_rows_program[(num_rows // _WHOLE_ROWS,)](
            x, choices, weights, group_of, scales, rows, per_token, num_choices, num_groups, width,
            IS_PADDED=is_padded, KIND=kind, GRAIN=GRAIN, ROWS=_WHOLE_ROWS, BLOCK=triton.next_power_of_2(width),
            num_warps=_WARPS,
        )  # fmt: skip
        return (rows.view(torch.float8_e4m3fn), scales), None
    sizes = [num_rows * plain, num_groups * width * transpose]
    amax = torch.zeros(sum(sizes), dtype=torch.int32, device=x.device)
    of_rows, of_columns = (part if size else None for part, size in zip(amax.split(sizes), sizes))
    grid = len(group_of), triton.cdiv(width, _BLOCK)
    group_amax_program[grid](
        x, choices, weights, group_of, of_rows, of_columns, per_token, num_choices, num_groups, width,
        IS_PADDED=is_padded, KIND=kind, ROWS=GRAIN, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    data = torch.empty(num_rows, width, dtype=torch.uint8, device=x.device) if plain else None
    turned = torch.empty(width, num_rows, dtype=torch.uint8, device=x.device) if transpose else None
    group_rows_program[grid](
        x, choices, weights, group_of, of_rows, of_columns, data, turned,
        per_token, num_choices, num_groups, num_rows, width,
        IS_PADDED=is_padded, KIND=kind, ROWS=GRAIN, BLOCK=_BLOCK, num_warps=_WARPS,
    )  # fmt: skip
    scale, turned_scale = scales_of(amax.view(torch.float32), torch.float8_e4m3fn).split(sizes)
    return (
        None if data is None else (data.view(torch.float8_e4m3fn), scale),
        None if turned is None else (turned.view(torch.float8_e4m3fn), turned_scale.view(num_groups, width)),
    )
