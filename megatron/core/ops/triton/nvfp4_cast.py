"""Triton kernel that quantizes a matrix, or its Hadamard-transformed transpose, to NVFP4 in one read of the matrix."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from megatron.core.ops.triton.fp8_cast import _float8_bits

_BLOCK = 64


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
def _word(k0, k1, column):
    """Return the random word of a row and a column, as `megatron.core.ops.dropout.keyed_words` does."""
    word = k0.to(tl.uint32) + (column + 1).to(tl.uint32) * 0x9E3779B1
    word ^= word >> 16
    word *= 0x21F0AAAD
    word ^= word >> 15
    word ^= k1.to(tl.uint32)
    word *= 0x735A2D97
    word ^= word >> 15
    return word


@triton.jit
def nvfp4_program(
    x: tl.tensor,
    tensor_scale: tl.tensor,
    first_key: tl.tensor,
    second_key: tl.tensor,
    features: tl.tensor,
    data: tl.tensor,
    scale: tl.tensor,
    amax: tl.tensor,
    num_rows: tl.tensor,
    width: tl.tensor,
    IS_TURNED: tl.constexpr,
    SIGNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write one tile of codes and scales of ``x: [num_rows, width]`` or of its transpose, or only update ``amax``."""
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = (row < num_rows)[:, None] & (column < width)[None, :]
    values = tl.load(x + row[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if IS_TURNED:
        values = _transform(tl.trans(values), SIGNS, BLOCK)
        inside = tl.trans(inside)
    if amax is not None:
        # Non-finite values become infinite: a maximum would lose them.
        magnitude = tl.where(tl.abs(values) < float("inf"), tl.abs(values), float("inf"))
        tl.atomic_max(amax, tl.max(magnitude))
    if data is not None:
        values *= 1.0 / tl.load(tensor_scale)
        segments = tl.reshape(values, (BLOCK, BLOCK // 16, 16))
        bits = _float8_bits(tl.max(tl.abs(segments), axis=2) * 0.16666666666666666, False)
        block_scale = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        inverse = tl.where(block_scale == 0.0, 0.0, tl.div_rn(1.0, block_scale))
        scaled = tl.reshape(segments * inverse[:, :, None], (BLOCK, BLOCK))
        magnitude = tl.minimum(tl.abs(scaled), 6.0)
        step = tl.where(magnitude < 2.0, 0.5, tl.where(magnitude < 4.0, 1.0, 2.0))
        steps = magnitude * tl.where(magnitude < 2.0, 2.0, tl.where(magnitude < 4.0, 1.0, 0.5))
        if first_key is not None:
            k0 = tl.load(first_key + row, mask=row < num_rows, other=0)
            k1 = tl.load(second_key + row, mask=row < num_rows, other=0)
            feature = tl.load(features + column, mask=column < width, other=0)
            word = _word(k0[:, None], k1[:, None], feature[None, :])
            if IS_TURNED:
                word = tl.trans(word)
            below = tl.floor(steps)
            uniform = (word >> 8).to(tl.float32) * 5.9604644775390625e-08
            rounded = (below + tl.where(uniform < steps - below, 1.0, 0.0)) * step
        else:
            # Adding 1.5 * 2**23 leaves no bits below 1, rounded to nearest even.
            rounded = ((steps + 12582912.0) - 12582912.0) * step
        code = tl.where(rounded <= 2.0, 2.0 * rounded, tl.where(rounded <= 4.0, rounded + 2.0, 7.0))
        code = tl.where(tl.abs(scaled) < float("inf"), code, 0.0)
        sign = (scaled.to(tl.int32, bitcast=True) >> 28) & 8
        low, high = tl.split(tl.reshape(code.to(tl.int32) | sign, (BLOCK, BLOCK // 2, 2)))
        if IS_TURNED:
            first, second = column, (tl.program_id(0) * BLOCK).to(tl.int64)
            height, length = width, num_rows
        else:
            first, second = row, (tl.program_id(1) * BLOCK).to(tl.int64)
            height, length = num_rows, width
        pair = second // 2 + tl.arange(0, BLOCK // 2)
        is_inside = (first < height)[:, None] & (pair < length // 2)[None, :]
        tl.store(
            data + first[:, None] * (length // 2) + pair[None, :], (low | (high << 4)).to(tl.uint8), mask=is_inside
        )
        segment = second // 16 + tl.arange(0, BLOCK // 16)
        is_inside = (first < height)[:, None] & (segment < length // 16)[None, :]
        tl.store(scale + first[:, None] * (length // 16) + segment[None, :], bits, mask=is_inside)


def nvfp4_amax(x: torch.Tensor, turned: bool, signs: int) -> torch.Tensor:
    """Return the largest absolute value of a matrix or of its transformed transpose; infinite if one is not finite.

    Shapes: ``x: [n, m] -> []`` float32.
    """
    amax = torch.zeros((), device=x.device)
    _launch(x, turned, signs, amax=amax)
    return amax


def quantize_segments(
    x: torch.Tensor,
    tensor_scale: torch.Tensor,
    turned: bool,
    signs: int,
    random: tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return packed codes and E4M3 scales of segments of 16 of a matrix or of its transformed transpose.

    ``random`` are two keys per row and the feature of each column, for stochastic rounding.

    Shapes: ``x: [n, m] -> [n, m / 2], [n, m / 16]``; turned ``[m, n / 2], [m, n / 16]``.
    """
    rows, length = (x.shape[1], x.shape[0]) if turned else (x.shape[0], x.shape[1])
    assert length % 16 == 0, f"{length} elements of a row are not divisible by 16"
    data = torch.empty(rows, length // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows, length // 16, dtype=torch.uint8, device=x.device)
    first_key, second_key, features = random or (None, None, None)
    _launch(x, turned, signs, tensor_scale, first_key, second_key, features, data, scale)
    return data, scale.view(torch.float8_e4m3fn)


def _launch(
    x: torch.Tensor,
    turned: bool,
    signs: int,
    tensor_scale: torch.Tensor | None = None,
    first_key: torch.Tensor | None = None,
    second_key: torch.Tensor | None = None,
    features: torch.Tensor | None = None,
    data: torch.Tensor | None = None,
    scale: torch.Tensor | None = None,
    amax: torch.Tensor | None = None,
) -> None:
    x = x.detach().contiguous()
    if not x.numel():
        return
    grid = triton.cdiv(x.shape[0], _BLOCK), triton.cdiv(x.shape[1], _BLOCK)
    nvfp4_program[grid](
        *(x, tensor_scale, first_key, second_key, features, data, scale, amax, x.shape[0], x.shape[1]),
        IS_TURNED=turned,
        SIGNS=signs,
        BLOCK=_BLOCK,
    )
