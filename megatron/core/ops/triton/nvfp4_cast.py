"""Triton kernels that quantize a matrix and its transpose to NVFP4: one read for the amax, one for all results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.triton.fp8_cast import _float8_bits
from megatron.core.ops.triton.fp8_scaled_cast import _absolute_bits, _exponents, _inverse_powers, _powers

_BLOCK = 64
SCALE_STRIDE = 4
"""Stride between scales of tensors in elements: cuBLAS requires scales to be aligned to 16 bytes."""
TILE = 128
"""Sizes of a matrix with scales in cuBLAS's tiles are multiples of this number."""


@triton.jit
def _transform(values, SIGNS: tl.constexpr, BLOCK: tl.constexpr):
    """Transform each segment of 16 elements of a row, with the additions of the fast Hadamard transform."""
    signs = 1.0 - 2.0 * ((SIGNS >> tl.arange(0, 16)) & 1).to(tl.float32)
    segments = tl.reshape(values, (BLOCK * BLOCK // 16, 16)) * signs[None, :]
    for _ in tl.static_range(4):
        even, odd = tl.split(tl.reshape(segments, (BLOCK * BLOCK // 16, 8, 2)))
        joined = tl.permute(tl.join(even + odd, even - odd), (0, 2, 1))
        segments = tl.reshape(joined, (BLOCK * BLOCK // 16, 16))
    return tl.reshape(segments * 0.25, (BLOCK, BLOCK))


@triton.jit
def _raise_amax(amax, values):
    """Raise ``amax`` to the largest absolute value; non-finite values become infinite, since a maximum loses NaN."""
    magnitude = tl.where(tl.abs(values) < float("inf"), tl.abs(values), float("inf"))
    tl.atomic_max(amax, tl.max(magnitude), sem="relaxed")


@triton.jit
def nvfp4_amax_program(
    x: tl.tensor,
    amax: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    IS_PLAIN: tl.constexpr,
    IS_TURNED: tl.constexpr,
    SIGNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Raise ``amax`` to the largest absolute values of a tile of ``x`` and of its transformed transpose."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if IS_PLAIN:
        _raise_amax(amax, values)
    if IS_TURNED:
        _raise_amax(amax + (1 if IS_PLAIN else 0), _transform(tl.trans(values), SIGNS, BLOCK))


@triton.jit
def _words(first_key, second_key, features, row, column, num_rows, width):
    """Return the random words of rows and columns, as `megatron.core.ops.dropout.keyed_words` does."""
    k0 = tl.load(first_key + row, mask=row < num_rows, other=0)[:, None]
    k1 = tl.load(second_key + row, mask=row < num_rows, other=0)[:, None]
    feature = tl.load(features + column, mask=column < width, other=0)[None, :]
    word = k0.to(tl.uint32) + (feature + 1).to(tl.uint32) * 0x9E3779B1
    word ^= word >> 16
    word *= 0x21F0AAAD
    word ^= word >> 15
    word ^= k1.to(tl.uint32)
    word *= 0x735A2D97
    word ^= word >> 15
    return word


@triton.jit
def _quantize(values, words, exponent, IS_RANDOM: tl.constexpr, IS_SQUARE: tl.constexpr, BLOCK: tl.constexpr):
    """Return the codes of a tile, and the bytes of the scales of its segments, with ``IS_SQUARE`` of its squares.

    ``exponent`` is that of the tensor's scale.
    """
    values *= _inverse_powers(exponent)
    if IS_SQUARE:
        segments = tl.reshape(values, (BLOCK // 16, 16, BLOCK // 16, 16))
        largest = tl.max(tl.max(tl.abs(segments), axis=3), axis=1)
    else:
        segments = tl.reshape(values, (BLOCK, BLOCK // 16, 16))
        largest = tl.max(tl.abs(segments), axis=2)
    bits = _float8_bits(largest * 0.16666666666666666, False)
    block_scale = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    inverse = tl.where(block_scale == 0.0, 0.0, tl.div_rn(1.0, block_scale))
    if IS_SQUARE:
        scaled = tl.reshape(segments * inverse[:, None, :, None], (BLOCK, BLOCK))
    else:
        scaled = tl.reshape(segments * inverse[:, :, None], (BLOCK, BLOCK))
    magnitude = tl.minimum(tl.abs(scaled), 6.0)
    # The codes below 4 are twice the value, those to 6 the value plus 2, and 6 and 7 half of it plus 4.
    steps = magnitude * tl.where(magnitude < 2.0, 2.0, tl.where(magnitude < 4.0, 1.0, 0.5))
    first_code = tl.where(magnitude < 2.0, 0, tl.where(magnitude < 4.0, 2, 4))
    if IS_RANDOM:
        below = tl.floor(steps)
        uniform = (words >> 8).to(tl.float32) * 5.9604644775390625e-08
        rounded = below.to(tl.int32) + (uniform < steps - below).to(tl.int32)
    else:
        # Adding 1.5 * 2**23 rounds to nearest even, and leaves the integer in the lowest bits.
        rounded = (steps + 12582912.0).to(tl.int32, bitcast=True)
    sign = (scaled.to(tl.int32, bitcast=True) >> 28) & 8
    return ((rounded + first_code) & 7) | sign, bits


@triton.jit
def _of_rows(bits, BLOCK: tl.constexpr):
    """Return the scale of each segment of each row from those of squares."""
    spread = tl.broadcast_to(bits[:, None, :], (BLOCK // 16, 16, BLOCK // 16))
    return tl.reshape(spread, (BLOCK, BLOCK // 16))


@triton.jit
def _store(codes, bits, data, scale, first, second, height, length, IS_TILED: tl.constexpr, BLOCK: tl.constexpr):
    """Store a tile of the codes ``data: [height, length / 2]``, and the scales of the segments of its rows."""
    low, high = tl.split(tl.reshape(codes, (BLOCK, BLOCK // 2, 2)))
    row = first + tl.arange(0, BLOCK)
    pair = second // 2 + tl.arange(0, BLOCK // 2)
    is_inside = (row < height)[:, None] & (pair < length // 2)[None, :]
    tl.store(data + row[:, None] * (length // 2) + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=is_inside)
    segment = tl.arange(0, BLOCK // 16)
    if IS_TILED:
        # A tile has 128 rows of four scales, in which every 32nd row is contiguous.
        tile = (first // 128) * (length // 64) + second // 64
        place = (row % 32) * 16 + (row % 128) // 32 * 4
        tl.store(scale + tile * 512 + place[:, None] + segment[None, :], bits)
    else:
        segment = second // 16 + segment
        is_inside = (row < height)[:, None] & (segment < length // 16)[None, :]
        tl.store(scale + row[:, None] * (length // 16) + segment[None, :], bits, mask=is_inside)


@triton.jit
def _tensor_exponent(amax):
    """Return the biased exponent of a tensor's scale, by the rule of `megatron.core.ops.nvfp4_tensor`."""
    return _exponents(_absolute_bits(tl.div_rn(tl.load(amax), 6.0)), False)


@triton.jit
def nvfp4_program(
    x: tl.tensor,
    amax: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    features: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    turned: tl.tensor,
    turned_scale: tl.tensor,
    tensor_scale: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    SIGNS: tl.constexpr,
    IS_SQUARE: tl.constexpr,
    IS_TILED: tl.constexpr,
    STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one tile of ``x: [num_rows, width]`` in NVFP4, of its transformed transpose, or of both.

    With ``IS_SQUARE`` squares of 16 × 16 elements share a scale, and the transpose is not transformed.
    """
    first_row = (tl.program_id(0) * BLOCK).to(tl.int64)
    first_column = (tl.program_id(1) * BLOCK).to(tl.int64)
    row, column = first_row + tl.arange(0, BLOCK), first_column + tl.arange(0, BLOCK)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
    IS_RANDOM: tl.constexpr = first_key is not None
    words = values
    if IS_SQUARE:
        exponent = _tensor_exponent(amax)
        tl.store(tensor_scale, _powers(exponent), mask=is_first)
        codes, bits = _quantize(values, words, exponent, False, True, BLOCK)
        if data is not None:
            rows = _of_rows(bits, BLOCK)
            _store(codes, rows, data, scale, first_row, first_column, num_rows, width, IS_TILED, BLOCK)
        if turned is not None:
            codes, rows = tl.trans(codes), _of_rows(tl.trans(bits), BLOCK)
            _store(codes, rows, turned, turned_scale, first_column, first_row, width, num_rows, IS_TILED, BLOCK)
    else:
        if data is not None:
            exponent = _tensor_exponent(amax)
            tl.store(tensor_scale, _powers(exponent), mask=is_first)
            if IS_RANDOM:
                words = _words(first_key, second_key, features, row, column, num_rows, width)
            codes, bits = _quantize(values, words, exponent, IS_RANDOM, False, BLOCK)
            _store(codes, bits, data, scale, first_row, first_column, num_rows, width, IS_TILED, BLOCK)
        if turned is not None:
            side: tl.constexpr = 0 if data is None else 1
            exponent = _tensor_exponent(amax + side)
            tl.store(tensor_scale + side * STRIDE, _powers(exponent), mask=is_first)
            values = _transform(tl.trans(values), SIGNS, BLOCK)
            words = values
            if IS_RANDOM:
                own = side * num_rows
                words = tl.trans(_words(first_key + own, second_key + own, features, row, column, num_rows, width))
            codes, bits = _quantize(values, words, exponent, IS_RANDOM, False, BLOCK)
            _store(codes, bits, turned, turned_scale, first_column, first_row, width, num_rows, IS_TILED, BLOCK)


Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Codes, E4M3 scales of segments, and the scale of the tensor."""


def nvfp4_amaxes(x: torch.Tensor, signs: int, *, plain: bool, transpose: bool) -> torch.Tensor:
    """Return the largest absolute values of a matrix (``plain``), of its transformed transpose, or of both.

    They are infinite if a value is not finite.

    Shapes: ``x: [n, m] -> [1]`` or ``[2]`` float32.
    """
    x = x.detach().contiguous()
    amax = torch.zeros(int(plain) + int(transpose), device=x.device)
    if x.numel():
        nvfp4_amax_program[_grid(x)](
            x, amax, x.shape[0], x.shape[1], IS_PLAIN=plain, IS_TURNED=transpose, SIGNS=signs, BLOCK=_BLOCK
        )
    return amax


def cast_to_nvfp4(
    x: torch.Tensor,
    amax: torch.Tensor,
    signs: int,
    random: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None = None,
    *,
    plain: bool,
    transpose: bool,
    square: bool = False,
) -> tuple[Part | None, Part | None]:
    """Quantize a matrix (``plain``) and its transformed transpose in segments of 16, or only one of them.

    With ``square`` 16 rows have the same scales, and the transpose is not transformed. ``amax`` is the result of
    `nvfp4_amaxes`; with ``square`` it has one number. ``random`` are two keys per row for each of the results, and the
    feature of each column, for stochastic rounding. Scales are in cuBLAS's tiles if both sizes are multiples of 128.

    Shapes: ``x: [n, m]``, keys ``[results, n]``, features ``[m] -> [n, m / 2], [n, m / 16], [1, 1]``; for the transpose
    with ``n`` and ``m`` exchanged; scales in tiles ``[n / 128, 8 m]``.
    """
    x = x.detach().contiguous()
    rows, width = x.shape
    is_tiled = rows % TILE == 0 and width % TILE == 0
    for size, is_summed in ((width, plain or square), (rows, transpose or square)):
        assert not is_summed or size % 16 == 0, f"{size} elements of a row are not divisible by 16"
    tensor_scale = torch.empty(len(amax), SCALE_STRIDE, device=x.device)

    def empty(height: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        scale = (height // TILE, TILE * length // 16) if is_tiled else (height, length // 16)
        sizes = (height, length // 2), scale
        data, scales = (torch.empty(size, dtype=torch.uint8, device=x.device) for size in sizes)
        return data, scales

    data, scale = empty(rows, width) if plain else (None, None)
    turned, turned_scale = empty(width, rows) if transpose else (None, None)
    if x.numel():
        nvfp4_program[_grid(x)](
            x, amax, *(random or (None, None, None)), data, scale, turned, turned_scale, tensor_scale, rows, width,
            SIGNS=signs, IS_SQUARE=square, IS_TILED=is_tiled, STRIDE=SCALE_STRIDE, BLOCK=_BLOCK,
        )  # fmt: skip
    return _part(data, scale, tensor_scale[0]), _part(turned, turned_scale, tensor_scale[-1])


def _part(data: torch.Tensor | None, scale: torch.Tensor | None, tensor_scale: torch.Tensor) -> Part | None:
    if data is None or scale is None:
        return None
    return data, scale.view(torch.float8_e4m3fn), tensor_scale[:1].view(1, 1)


def _grid(x: torch.Tensor) -> tuple[int, int]:
    return triton.cdiv(x.shape[0], _BLOCK), triton.cdiv(x.shape[1], _BLOCK)
