"""Triton kernel that casts a matrix to FP8, with its transpose and amax, in one read of the matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
"""FP8 formats that the kernel writes."""
_BLOCK = 64


@triton.jit
def _float8_bits(x, IS_E5M2: tl.constexpr):
    """Return the bits of ``x`` in FP8, rounded to nearest even, saturated at the largest number.

    The kernel rounds by itself, so that the result does not depend on a device's conversion.
    """
    limit: tl.constexpr = 57344.0 if IS_E5M2 else 448.0
    smallest_normal: tl.constexpr = 6.103515625e-05 if IS_E5M2 else 0.015625
    # 1.5 * 2**23 units in the last place: after adding this number a float32 has no bits below one unit.
    places: tl.constexpr = 3145728.0 if IS_E5M2 else 1572864.0
    clipped = tl.minimum(tl.maximum(x, -limit), limit)
    power = (clipped.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    offset = tl.maximum(power, smallest_normal) * places
    rounded = (clipped + offset) - offset
    bits = rounded.to(tl.float8e5 if IS_E5M2 else tl.float8e4nv).to(tl.uint8, bitcast=True)
    # The addition loses the sign of zero.
    bits |= ((x.to(tl.int32, bitcast=True) >> 24) & 0x80).to(tl.uint8)
    # Non-finite values become NaN, which has the same bits in both formats.
    return tl.where(tl.abs(x) < float("inf"), bits, 0x7F)


@triton.jit
def cast_program(
    x: tl.tensor,
    scale: tl.tensor,
    data: tl.tensor,
    turned: tl.tensor,
    amax: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    IS_E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one tile of the bytes ``data: [num_rows, width]`` and of their transpose, or only one of them."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if amax is not None:
        tl.atomic_max(amax, tl.max(tl.abs(values)))
    bits = _float8_bits(values / tl.load(scale), IS_E5M2)
    if data is not None:
        tl.store(data + row[:, None] * width + column[None, :], bits, mask=inside)
    if turned is not None:
        there = turned + column[:, None] * num_rows + row[None, :]
        tl.store(there, tl.trans(bits), mask=tl.trans(inside))


def cast_and_transpose(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, amax: torch.Tensor | None, plain: bool, transpose: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return a matrix in FP8, its transpose, or both, contiguous, and update ``amax`` to the maximum.

    Shapes: ``x: [n, m]``, ``scale: [1, 1]``, ``amax: [] -> [n, m], [m, n]``.
    """
    assert dtype in DTYPES, dtype
    x = x.detach().contiguous()
    num_rows, width = x.shape
    data = torch.empty(num_rows, width, dtype=torch.uint8, device=x.device) if plain else None
    turned = torch.empty(width, num_rows, dtype=torch.uint8, device=x.device) if transpose else None
    if x.numel():
        grid = triton.cdiv(num_rows, _BLOCK), triton.cdiv(width, _BLOCK)
        is_e5m2 = dtype is torch.float8_e5m2
        cast_program[grid](x, scale, data, turned, amax, num_rows, width, IS_E5M2=is_e5m2, BLOCK=_BLOCK)
    return (None if data is None else data.view(dtype)), (None if turned is None else turned.view(dtype))
