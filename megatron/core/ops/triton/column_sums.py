"""Second stage of sums over rows: adds up the partial sums that other kernels write, into the gradients.

The number of partial sums does not depend on the device, and there are no atomic additions, so that results are the
same on every GPU.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

_ROWS = 64
_COLUMNS = 32


@triton.jit
def _column_sums(parts, total, num_parts, width, ADDS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum some columns of the partial sums into ``total``, added to its previous value if ``ADDS``."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
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
    parts: tl.tensor,
    first: tl.tensor,
    second: tl.tensor,
    third: tl.tensor,
    num_parts: tl.tensor,
    width: tl.tensor,
    FIRST_ADDS: tl.constexpr,
    SECOND_ADDS: tl.constexpr,
    THIRD_ADDS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum ``parts: [totals, num_parts, width]`` into up to three totals; programs along axis 1 process one each."""
    place = tl.program_id(1)
    parts += place * num_parts * width
    if place == 0:
        _column_sums(parts, first, num_parts, width, FIRST_ADDS, ROWS, COLUMNS)
    elif place == 1:
        if second is not None:
            _column_sums(parts, second, num_parts, width, SECOND_ADDS, ROWS, COLUMNS)
    elif third is not None:
        _column_sums(parts, third, num_parts, width, THIRD_ADDS, ROWS, COLUMNS)


def sum_parts(parts: torch.Tensor, totals: Sequence[torch.Tensor], adds: Sequence[bool]) -> None:
    """Sum the partial sums over rows and overwrite each total, or add to it.

    Shapes: ``parts: [totals, n, width]`` in float32, up to three ``totals: [width]``.
    """
    _, num_parts, width = parts.shape
    first, second, third = (*totals, None, None)[:3]
    first_adds, second_adds, third_adds = (*adds, False, False)[:3]
    sums_program[(triton.cdiv(width, _COLUMNS), len(totals))](
        parts, first, second, third, num_parts, width,
        FIRST_ADDS=first_adds, SECOND_ADDS=second_adds, THIRD_ADDS=third_adds, ROWS=_ROWS, COLUMNS=_COLUMNS,
    )  # fmt: skip
