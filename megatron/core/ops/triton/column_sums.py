"""Second stage of sums over rows: adds up the partial sums that other kernels write, into the gradients.

The number of partial sums does not depend on the device, and there are no atomic additions, so that results are the
same on every GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

MAX_TOTALS = 8
"""Totals per launch."""
_ROWS = 64
_COLUMNS = 32


@triton.jit
def _column_sums(parts, total, num_parts, width, ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum some columns of the partial sums into ``total``, added to its previous value if ``ADDS``."""
    first_column = tl.program_id(0) * COLUMNS
    if first_column < width:
        column = first_column + tl.arange(0, COLUMNS)
        inside = column < width
        sums = tl.zeros((ROWS, COLUMNS), tl.float32)
        for first in range(0, num_parts, ROWS):
            row = first + tl.arange(0, ROWS)[:, None]
            sums += tl.load(parts + row * width + column[None, :], mask=(row < num_parts) & inside[None, :], other=0.0)
        result = tl.sum(sums, axis=0)
        if ADDS:
            result += tl.load(total + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + column, result.to(total.dtype.element_ty), mask=inside)


@triton.jit
def sums_program(
    parts0: tl.tensor,
    total0: tl.tensor,
    num_parts0: tl.tensor,
    width0: tl.tensor,
    ADDS0: tl.constexpr,
    parts1: tl.tensor,
    total1: tl.tensor,
    num_parts1: tl.tensor,
    width1: tl.tensor,
    ADDS1: tl.constexpr,
    parts2: tl.tensor,
    total2: tl.tensor,
    num_parts2: tl.tensor,
    width2: tl.tensor,
    ADDS2: tl.constexpr,
    parts3: tl.tensor,
    total3: tl.tensor,
    num_parts3: tl.tensor,
    width3: tl.tensor,
    ADDS3: tl.constexpr,
    parts4: tl.tensor,
    total4: tl.tensor,
    num_parts4: tl.tensor,
    width4: tl.tensor,
    ADDS4: tl.constexpr,
    parts5: tl.tensor,
    total5: tl.tensor,
    num_parts5: tl.tensor,
    width5: tl.tensor,
    ADDS5: tl.constexpr,
    parts6: tl.tensor,
    total6: tl.tensor,
    num_parts6: tl.tensor,
    width6: tl.tensor,
    ADDS6: tl.constexpr,
    parts7: tl.tensor,
    total7: tl.tensor,
    num_parts7: tl.tensor,
    width7: tl.tensor,
    ADDS7: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum ``parts: [num_parts, width]`` of up to eight gradients; programs along axis 1 process one each."""
    place = tl.program_id(1)
    if place == 0:
        _column_sums(parts0, total0, num_parts0, width0, ADDS0, ROWS, COLUMNS)
    elif place == 1:
        if parts1 is not None:
            _column_sums(parts1, total1, num_parts1, width1, ADDS1, ROWS, COLUMNS)
    elif place == 2:
        if parts2 is not None:
            _column_sums(parts2, total2, num_parts2, width2, ADDS2, ROWS, COLUMNS)
    elif place == 3:
        if parts3 is not None:
            _column_sums(parts3, total3, num_parts3, width3, ADDS3, ROWS, COLUMNS)
    elif place == 4:
        if parts4 is not None:
            _column_sums(parts4, total4, num_parts4, width4, ADDS4, ROWS, COLUMNS)
    elif place == 5:
        if parts5 is not None:
            _column_sums(parts5, total5, num_parts5, width5, ADDS5, ROWS, COLUMNS)
    elif place == 6:
        if parts6 is not None:
            _column_sums(parts6, total6, num_parts6, width6, ADDS6, ROWS, COLUMNS)
    elif parts7 is not None:
        _column_sums(parts7, total7, num_parts7, width7, ADDS7, ROWS, COLUMNS)


def sum_parts(parts: Sequence[torch.Tensor], totals: Sequence[torch.Tensor], adds: Sequence[bool]) -> None:
    """Sum each matrix of partial sums over its rows and overwrite its total, or add to it, in one launch.

    Shapes: up to `MAX_TOTALS` contiguous ``parts: [n, width]`` in float32, ``totals: [width]`` with their own sizes.
    """
    given: list[torch.Tensor | int | bool | None] = []
    for each, total, is_added in zip(parts, totals, adds, strict=True):
        given += (each, total, *each.shape, is_added)
    given += (None, None, 0, 0, False) * (MAX_TOTALS - len(totals))
    columns = max(total.numel() for total in totals)
    sums_program[(triton.cdiv(columns, _COLUMNS), len(totals))](*given, ROWS=_ROWS, COLUMNS=_COLUMNS)
