"""Triton kernels that quantize a matrix to FP8, and its transpose, with the scales of their rows, segments or squares.

A block of 1 × 128, 1 × 32 or 128 × 128 elements lies in one tile: one kernel reads the matrix once, and writes both
results and their scales. A row spans many tiles: one kernel reads the matrix for the largest values, a second for the
results. All numbers are bit for bit those of `megatron.core.ops.fp8_tensor.quantize`.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.triton.fp8_cast import _float8_bits

_AMAX_BLOCK = 128
_AMAX_WARPS = 16
_ROWS_BLOCK = 64
_SCALES_BLOCK = 512
TILE = 128
"""Rows and columns of the matrix that one instance quantizes in blocks. cuBLAS's tiles of MX scales have the size of
such a tile: 128 rows of 4 scales."""
_TILE_SCALES = 512
_TILE_WARPS = 32


@triton.jit
def _absolute_bits(x):
    """Return the bits of absolute values, which as integers are ordered like the values, with NaN as the largest."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _exponents(amax, IS_E5M2: tl.constexpr):
    """Return the biased exponents of the smallest powers of two that bring values up to ``amax`` into range.

    ``amax`` are bits of float32 numbers. Infinity and NaN have the exponent 255.
    """
    # The largest number is 1.75 times 2^8 or 2^15: a larger mantissa than 1.75 carries into the exponent.
    places: tl.constexpr = 15 if IS_E5M2 else 8
    # The quotient of a smaller number and the largest of the format is zero in float32.
    zero: tl.constexpr = 28672 if IS_E5M2 else 224
    # NaN may have any sign.
    amax &= 0x7FFFFFFF
    exponents = tl.maximum(((tl.minimum(amax, 0x7F800000) + 0x1FFFFF) >> 23) - places, 1)
    return tl.where(amax < 0x7F800000, tl.where(amax > zero, exponents, 127), 255)


@triton.jit
def _powers(exponents):
    """Return powers of two by their biased exponents, as float32; NaN for 255."""
    bits = tl.where(exponents < 255, exponents << 23, 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _inverse_powers(exponents):
    """Return the inverses of `_powers`."""
    bits = tl.where(exponents < 255, (254 - exponents) << 23, 0x7FC00000)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def amax_program(
    x: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    whole: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    BLOCK: tl.constexpr,
):
    """Raise ``rows: [num_rows]``, ``columns: [width]`` and ``whole: []`` to the bits of the largest absolute values."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    bits = _absolute_bits(values)
    if rows is not None:
        tl.atomic_max(rows + row, tl.max(bits, axis=1), mask=row < num_rows, sem="relaxed")
    if columns is not None:
        tl.atomic_max(columns + column, tl.max(bits, axis=0), mask=column < width, sem="relaxed")
    if whole is not None:
        tl.atomic_max(whole, tl.max(bits), sem="relaxed")


@triton.jit
def scales_program(amax: tl.tensor, scale: tl.tensor, count: tl.tensor, IS_E5M2: tl.constexpr, BLOCK: tl.constexpr):
    """Write the scales of matrices or blocks with the given bits of their largest absolute values."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exponents = _exponents(tl.load(amax + index, mask=index < count, other=0), IS_E5M2)
    tl.store(scale + index, _powers(exponents), mask=index < count)


@triton.jit
def rows_program(
    x: tl.tensor,
    row_amax: tl.tensor,
    column_amax: tl.tensor,
    scale: tl.tensor,
    turned_scale: tl.tensor,
    data: tl.tensor,
    turned: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    IS_E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one tile of ``data: [num_rows, width]`` with one scale per row, and of ``turned: [width, num_rows]``."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if data is not None:
        exponents = _exponents(tl.load(row_amax + row, mask=row < num_rows, other=0), IS_E5M2)
        tl.store(scale + row, _powers(exponents), mask=(row < num_rows) & (tl.program_id(1) == 0))
        bits = _float8_bits(values * _inverse_powers(exponents)[:, None], IS_E5M2)
        tl.store(data + row[:, None] * width + column[None, :], bits, mask=inside)
    if turned is not None:
        exponents = _exponents(tl.load(column_amax + column, mask=column < width, other=0), IS_E5M2)
        tl.store(turned_scale + column, _powers(exponents), mask=(column < width) & (tl.program_id(0) == 0))
        bits = _float8_bits(values * _inverse_powers(exponents)[None, :], IS_E5M2)
        there = turned + column[:, None] * num_rows + row[None, :]
        tl.store(there, tl.trans(bits), mask=tl.trans(inside))


@triton.jit
def segments_program(
    x: tl.tensor,
    scale: tl.tensor,
    turned_scale: tl.tensor,
    data: tl.tensor,
    turned: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    LENGTH: tl.constexpr,
    IS_TILED: tl.constexpr,
    IS_E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one tile of ``data: [num_rows, width]`` and of ``turned: [width, num_rows]``, by segments of their rows.

    Scales are float32 and column-major, or with ``IS_TILED`` the bytes of the exponents in cuBLAS's tiles.
    """
    # The tile has four dims: segments of rows, rows, segments of columns, columns. Offsets in it have 32 bits.
    SEGMENTS: tl.constexpr = BLOCK // LENGTH
    segment, place = tl.arange(0, SEGMENTS), tl.arange(0, LENGTH)
    row = segment[:, None, None, None] * LENGTH + place[None, :, None, None]
    column = segment[None, None, :, None] * LENGTH + place[None, None, None, :]
    first_row, first_column = tl.program_id(0).to(tl.int64) * BLOCK, tl.program_id(1).to(tl.int64) * BLOCK
    inside = (row < num_rows - first_row) & (column < width - first_column)
    x += first_row * width + first_column
    values = tl.load(x + (row * width + column), mask=inside, other=0.0)
    if data is not None:
        wide = values.to(tl.float32)
        exponents = _exponents(tl.max(_absolute_bits(wide), axis=3, keep_dims=True), IS_E5M2)
        if IS_TILED:
            tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
            scale += tile * (BLOCK * SEGMENTS)
            there = (place[:, None, None] * SEGMENTS + segment[:, None, None, None]) * SEGMENTS + segment[:, None]
            tl.store(scale + there, exponents.to(tl.uint8))
        else:
            index = tl.program_id(1).to(tl.int64) * SEGMENTS + segment[:, None]
            exists = (row < num_rows - first_row) & (index * LENGTH < width)
            tl.store(scale + index * num_rows + first_row + row, _powers(exponents), mask=exists)
        bits = _float8_bits(wide * _inverse_powers(exponents), IS_E5M2)
        data += first_row * width + first_column
        tl.store(data + (row * width + column), bits, mask=inside)
    if turned is not None:
        wide = values.to(tl.float32)
        exponents = _exponents(tl.max(_absolute_bits(wide), axis=1, keep_dims=True), IS_E5M2)
        if IS_TILED:
            tile = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0).to(tl.int64)
            turned_scale += tile * (BLOCK * SEGMENTS)
            there = (place * SEGMENTS + segment[:, None]) * SEGMENTS + segment[:, None, None, None]
            tl.store(turned_scale + there, exponents.to(tl.uint8))
        else:
            index = tl.program_id(0).to(tl.int64) * SEGMENTS + segment[:, None, None, None]
            exists = (index * LENGTH < num_rows) & (column < width - first_column)
            tl.store(turned_scale + index * width + first_column + column, _powers(exponents), mask=exists)
        bits = tl.permute(_float8_bits(wide * _inverse_powers(exponents), IS_E5M2), (2, 3, 0, 1))
        turned += first_column * num_rows + first_row
        there = tl.permute(column * num_rows + row, (2, 3, 0, 1))
        tl.store(turned + there, bits, mask=tl.permute(inside, (2, 3, 0, 1)))


@triton.jit
def squares_program(
    x: tl.tensor,
    scale: tl.tensor,
    turned_scale: tl.tensor,
    data: tl.tensor,
    turned: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    IS_E5M2: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one tile of ``data: [num_rows, width]`` and of ``turned: [width, num_rows]``, with one scale."""
    row = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    column = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    exponent = _exponents(tl.max(_absolute_bits(values)), IS_E5M2)
    bits = _float8_bits(values * _inverse_powers(exponent), IS_E5M2)
    if data is not None:
        tl.store(scale + tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1), _powers(exponent))
        tl.store(data + row[:, None] * width + column[None, :], bits, mask=inside)
    if turned is not None:
        place = tl.program_id(1).to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
        tl.store(turned_scale + place, _powers(exponent))
        there = turned + column[:, None] * num_rows + row[None, :]
        tl.store(there, tl.trans(bits), mask=tl.trans(inside))


def amaxes(
    x: torch.Tensor, *, rows: bool = False, columns: bool = False, whole: bool = False
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """Return the largest absolute values of each row, of each column and of a contiguous matrix, in one read of it.

    NaN is larger than every number.

    Shapes: ``x: [n, m] -> [n, 1], [m, 1], [1, 1]`` float32.
    """
    num_rows, width = x.shape
    sizes = [num_rows * rows, width * columns, int(whole)]
    bits = torch.zeros(sum(sizes), dtype=torch.int32, device=x.device).split(sizes)
    of_rows, of_columns, of_all = (part if size else None for part, size in zip(bits, sizes))
    grid = triton.cdiv(num_rows, _AMAX_BLOCK), triton.cdiv(width, _AMAX_BLOCK)
    amax_program[grid](x, of_rows, of_columns, of_all, num_rows, width, BLOCK=_AMAX_BLOCK, num_warps=_AMAX_WARPS)
    found = (None if part is None else part.view(torch.float32).unsqueeze(1) for part in (of_rows, of_columns, of_all))
    return tuple(found)  # type: ignore[return-value]


def scales_of(amax: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the smallest power of two that brings values up to each ``amax`` into a format's range by division.

    Shapes: ``[...] -> [...]`` float32.
    """
    bits = amax.contiguous().view(torch.int32)
    scale = torch.empty(amax.shape, device=amax.device)
    grid = (triton.cdiv(bits.numel(), _SCALES_BLOCK),)
    is_e5m2 = dtype is torch.float8_e5m2
    scales_program[grid](bits, scale, bits.numel(), IS_E5M2=is_e5m2, BLOCK=_SCALES_BLOCK)
    return scale


Part = tuple[torch.Tensor, torch.Tensor]
"""A quantized matrix, and its scales."""


def cast_rows(
    x: torch.Tensor, dtype: torch.dtype, row_amax: torch.Tensor | None, column_amax: torch.Tensor | None
) -> tuple[Part | None, Part | None]:
    """Quantize a contiguous matrix by rows, and its transpose by its own rows, for those whose amax is given.

    Shapes: ``x: [n, m]``, ``row_amax: [n, 1]``, ``column_amax: [m, 1] -> ([n, m], [n, 1]), ([m, n], [m, 1])``.
    """
    num_rows, width = x.shape
    data, turned, scale, turned_scale = None, None, None, None
    if row_amax is not None:
        data, scale = _bytes(x, num_rows, width), torch.empty_like(row_amax)
    if column_amax is not None:
        turned, turned_scale = _bytes(x, width, num_rows), torch.empty_like(column_amax)
    bits = (None if amax is None else amax.contiguous().view(torch.int32) for amax in (row_amax, column_amax))
    rows_program[triton.cdiv(num_rows, _ROWS_BLOCK), triton.cdiv(width, _ROWS_BLOCK)](
        x, *bits, scale, turned_scale, data, turned, num_rows, width,
        IS_E5M2=dtype is torch.float8_e5m2, BLOCK=_ROWS_BLOCK,
    )  # fmt: skip
    return _part(data, scale, dtype), _part(turned, turned_scale, dtype)


def cast_segments(
    x: torch.Tensor, dtype: torch.dtype, length: int, *, plain: bool, transpose: bool, tiled: bool
) -> tuple[Part | None, Part | None]:
    """Quantize a contiguous matrix by segments of its rows, its transpose by segments of its own rows, or both.

    Scales are column-major float32 numbers. With ``tiled`` they are exponents in the tiles that cuBLAS reads, a row of
    tiles per row; n and m must be multiples of 128.

    Shapes: ``x: [n, m] -> ([n, m], [n, m / length]), ([m, n], [m, n / length])``; tiled scales ``[n / 128, 4 m]``,
    ``[m / 128, 4 n]``.
    """
    num_rows, width = x.shape
    assert not tiled or (num_rows % TILE == 0 == width % TILE and length * 4 == TILE), (x.shape, length)

    def empty_scales(rows: int, columns: int) -> torch.Tensor:
        if tiled:
            shape = rows // TILE, columns // TILE * _TILE_SCALES
            return torch.empty(shape, dtype=torch.float8_e8m0fnu, device=x.device)
        return torch.empty(triton.cdiv(columns, length), rows, device=x.device).t()

    data, turned, scale, turned_scale = None, None, None, None
    if plain:
        data, scale = _bytes(x, num_rows, width), empty_scales(num_rows, width)
    if transpose:
        turned, turned_scale = _bytes(x, width, num_rows), empty_scales(width, num_rows)
    written = (each if each is None or not tiled else each.view(torch.uint8) for each in (scale, turned_scale))
    segments_program[triton.cdiv(num_rows, TILE), triton.cdiv(width, TILE)](
        x, *written, data, turned, num_rows, width,
        LENGTH=length, IS_TILED=tiled, IS_E5M2=dtype is torch.float8_e5m2, BLOCK=TILE, num_warps=_TILE_WARPS,
    )  # fmt: skip
    return _part(data, scale, dtype), _part(turned, turned_scale, dtype)


def cast_squares(
    x: torch.Tensor, dtype: torch.dtype, *, plain: bool, transpose: bool
) -> tuple[Part | None, Part | None]:
    """Quantize a contiguous matrix by squares of 128 × 128, its transpose, or both.

    Shapes: ``x: [n, m] -> ([n, m], [n / 128, m / 128]), ([m, n], [m / 128, n / 128])``.
    """
    num_rows, width = x.shape
    grid = triton.cdiv(num_rows, TILE), triton.cdiv(width, TILE)
    data, turned, scale, turned_scale = None, None, None, None
    if plain:
        data, scale = _bytes(x, num_rows, width), torch.empty(grid, device=x.device)
    if transpose:
        turned, turned_scale = _bytes(x, width, num_rows), torch.empty(grid[::-1], device=x.device)
    squares_program[grid](
        x, scale, turned_scale, data, turned, num_rows, width,
        IS_E5M2=dtype is torch.float8_e5m2, BLOCK=TILE, num_warps=_TILE_WARPS,
    )  # fmt: skip
    return _part(data, scale, dtype), _part(turned, turned_scale, dtype)


def _bytes(x: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    return torch.empty(rows, columns, dtype=torch.uint8, device=x.device)


def _part(data: torch.Tensor | None, scale: torch.Tensor | None, dtype: torch.dtype) -> Part | None:
    return None if data is None or scale is None else (data.view(dtype), scale)
