"""FP8 matrices with one scale per block of elements, and GEMMs of them.

Every scale is a power of two, so that scaling is exact: the quantized value does not depend on the scale while it is in
range. Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; blocks of 32 (MX): Rouhani et al. 2023,
https://arxiv.org/abs/2310.10537. GEMMs run on the device's native FP8 kernels, or in float32 on the dequantized values.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from megatron.core.ops.gemm import linear
from megatron.core.ops.triton_support import casts_on_triton, runs_on_triton

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
_SMALLEST_EXPONENT, _LARGEST_EXPONENT, _EXPONENT_BIAS = -126, 127, 127
_MANTISSA_BITS = 23


@dataclass(frozen=True)
class Blocks:
    """Shape of the blocks of a matrix that share a scale; 0 rows or columns means all of them."""

    rows: int
    columns: int

    def fit(self, shape: torch.Size) -> bool:
        """Return whether the blocks divide a matrix of this shape evenly."""
        return all(length == 0 or size % length == 0 for size, length in zip(shape, (self.rows, self.columns)))


WHOLE = Blocks(0, 0)
ROWS = Blocks(1, 0)
SEGMENTS_OF_128 = Blocks(1, 128)
SQUARES_OF_128 = Blocks(128, 128)
SEGMENTS_OF_32 = Blocks(1, 32)
SEGMENTS_OF_16 = Blocks(1, 16)
SQUARES_OF_16 = Blocks(16, 16)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A matrix in FP8 and the scales that its blocks are multiplied by to dequantize it.

    Scales of 1 × 32 blocks of a matrix of 128 n × 128 m elements may be in the layout that cuBLAS reads: exponents
    (E8M0) in tiles of 128 × 4 scales, one row of tiles per row. Like the matrix, they can be concatenated along either
    dim.

    Shapes: ``data: [n, m]``, ``scale``: float32, one number per block, in two dimensions; in tiles ``[n / 128, 4 m]``.
    """

    data: torch.Tensor
    scale: torch.Tensor
    blocks: Blocks

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dequantized matrix.

        Shapes: ``-> [n, m]``.
        """
        return self.data.to(dtype) * _spread(self.block_scales(), self.blocks, self.data.shape).to(dtype)

    def block_scales(self) -> torch.Tensor:
        """Return the scales in two dimensions, one number per block."""
        return from_tiles(self.scale).float() if self.has_tiles else self.scale

    @property
    def has_tiles(self) -> bool:
        return self.scale.dtype is torch.float8_e8m0fnu

    def first_rows(self, count: int) -> Quantized:
        """Return the first rows of a matrix whose rows do not share scales."""
        if count == len(self.data):
            return self
        assert self.blocks.rows == 1, "rows share scales"
        return self.form(self.data[:count], self.block_scales()[:count])

    def transposed(self) -> Quantized:
        """Return the transpose, with transposed blocks."""
        return Quantized(self.data.t(), self.scale.t(), Blocks(self.blocks.columns, self.blocks.rows))

    @property
    def form(self) -> Callable[[torch.Tensor, torch.Tensor], Quantized]:
        """Return a function that makes a matrix of the same kind from its data and scales."""
        return partial(Quantized, blocks=self.blocks)

    def has_device_product(self, right: Quantized) -> bool:
        """Return whether the device multiplies this matrix by the transpose of ``right`` natively."""
        return _has_scaled_product(self, right)

    def device_product(
        self, right: Quantized, out_dtype: torch.dtype, *, narrow: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute ``self @ right.T`` with the device's native GEMM, with the arguments of `device_product`."""
        return device_product(self, right, out_dtype, narrow=narrow, out=out)


def amax_of(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Return the largest absolute value of each block; blocks at the edges may be partial.

    Shapes: ``[n, m] -> [blocks along n, blocks along m]`` float32.
    """
    if blocks == WHOLE and x.numel() and runs_on_triton(x):
        from megatron.core.ops.triton import amaxes

        _, _, whole = amaxes(x.detach().contiguous(), whole=True)
        assert whole is not None
        return whole
    amax = x.detach().abs()
    for dim, length in enumerate((blocks.rows, blocks.columns)):
        if length == 0:
            amax = amax.amax(dim, keepdim=True)
        elif length > 1:
            size = amax.shape[dim]
            missing = -size % length
            if missing:
                padding = (0, missing) if dim == 1 else (0, 0, 0, missing)
                amax = torch.nn.functional.pad(amax, padding)
            counted = (*amax.shape[:dim], -1, length, *amax.shape[dim + 1 :])
            amax = amax.reshape(counted).amax(dim + 1)
    return amax.float()


def scale_of(amax: torch.Tensor, dtype: torch.dtype, margin: int = 0) -> torch.Tensor:
    """Return the smallest power of two that brings values up to ``amax`` into a format's range by division.

    ``margin`` further powers of two are added as headroom. The scale is 1 for zeros, and NaN for non-finite values.

    Shapes: ``[...] -> [...]`` float32.
    """
    if margin == 0 and amax.numel() and dtype in (E4M3, E5M2) and runs_on_triton(amax):
        from megatron.core.ops.triton import scales_of

        return scales_of(amax.float(), dtype)
    mantissa, exponent = torch.frexp(amax.float() / torch.finfo(dtype).max)
    exponent = exponent - (mantissa == 0.5).int() + margin
    bits = exponent.clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT).int() + _EXPONENT_BIAS
    # Built from its bits, because a power of two computed on a device may be off by one ulp.
    scale = (bits << _MANTISSA_BITS).view(torch.float32)
    return torch.where(amax.isfinite(), torch.where(amax > 0, scale, 1.0), torch.nan)


def quantize(x: torch.Tensor, dtype: torch.dtype, blocks: Blocks, scale: torch.Tensor | None = None) -> Quantized:
    """Quantize a matrix to FP8, with its own scales or a given one; values out of range saturate.

    Non-finite values become NaN, so that they are not hidden.

    Shapes: ``x: [n, m]``, ``scale`` as in `Quantized`.
    """
    if scale is None:
        scale = scale_of(amax_of(x, blocks), dtype)
    return Quantized(_cast(x, dtype, _spread(scale, blocks, x.shape)), scale, blocks)


def quantize_whole(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    *,
    plain: bool = True,
    transpose: bool,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize a matrix (``plain``), its transpose, or both to FP8 with one scale; on CUDA both are row-major.

    ``amax`` is updated to the maximum of itself and the matrix's largest absolute value. On Triton one kernel reads
    ``x`` once.

    Shapes: ``x: [n, m]``, ``scale: [1, 1]``, ``amax: []``.
    """
    data, turned = _cast_whole(x, dtype, scale, amax, plain, transpose)
    return tuple(None if part is None else Quantized(part, scale, WHOLE) for part in (data, turned))  # type: ignore[return-value]


def quantize_both(
    x: torch.Tensor,
    dtype: torch.dtype,
    blocks: Blocks,
    *,
    plain: bool = True,
    transpose: bool,
    share: Callable[[torch.Tensor], object] | None = None,
    scale: torch.Tensor | None = None,
) -> tuple[Quantized | None, Quantized | None]:
    """Quantize a matrix along its rows (``plain``), its transpose along its own rows, or both.

    ``share`` is called with the amax of the transpose's rows before its scales are computed, if there is one per row.
    ``scale`` may have the known scales of square blocks. On Triton one kernel reads ``x`` once; with a scale per row it
    is read a first time for the amax.

    Shapes: ``x: [n, m] -> [n, m], [m, n]``.
    """
    if x.numel() and casts_on_triton(x):
        return _both_on_triton(x.detach().contiguous(), dtype, blocks, plain, transpose, share)
    first = quantize(x, dtype, blocks, scale) if plain or blocks == SQUARES_OF_128 else None
    if not transpose:
        return first, None
    if blocks == SQUARES_OF_128:
        assert first is not None
        return (first if plain else None), first.transposed()
    turned, turned_scale = x.t(), None
    if share is not None and blocks.columns == 0:
        amax = amax_of(turned, blocks)
        share(amax)
        turned_scale = scale_of(amax, dtype)
    return first, quantize(turned, dtype, blocks, turned_scale)


def _both_on_triton(
    x: torch.Tensor,
    dtype: torch.dtype,
    blocks: Blocks,
    plain: bool,
    transpose: bool,
    share: Callable[[torch.Tensor], object] | None,
) -> tuple[Quantized | None, Quantized | None]:
    from megatron.core.ops.triton import amaxes, cast_rows, cast_segments, cast_squares

    if blocks == ROWS:
        of_rows, of_columns, _ = amaxes(x, rows=plain, columns=transpose)
        if share is not None and of_columns is not None:
            share(of_columns)
        parts = cast_rows(x, dtype, of_rows, of_columns)
    elif blocks == SQUARES_OF_128:
        parts = cast_squares(x, dtype, plain=plain, transpose=transpose)
    else:
        assert blocks in (SEGMENTS_OF_32, SEGMENTS_OF_128), blocks
        tiled = blocks == SEGMENTS_OF_32 and all(size % _TILE_ROWS == 0 for size in x.shape)
        parts = cast_segments(x, dtype, blocks.columns, plain=plain, transpose=transpose, tiled=tiled)
    return tuple(None if part is None else Quantized(*part, blocks) for part in parts)  # type: ignore[return-value]


def _cast_whole(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, amax: torch.Tensor | None, plain: bool, transpose: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if casts_on_triton(x) and dtype in (E4M3, E5M2):
        from megatron.core.ops.triton import cast_and_transpose

        return cast_and_transpose(x, dtype, scale, amax, plain, transpose)
    if amax is not None:
        amax.copy_(torch.maximum(amax, x.detach().abs().amax().float()))
    data = _cast(x, dtype, scale)
    return (data if plain else None), (data.t() if transpose else None)


def _cast(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    scaled = x.detach().float() / scale
    # Non-finite values times zero are NaN.
    return (scaled.clamp(-limit, limit) + scaled * 0.0).to(dtype)


def _spread(scale: torch.Tensor, blocks: Blocks, shape: torch.Size) -> torch.Tensor:
    """Expand the scales, so that they multiply a matrix of this shape elementwise."""
    for dim, length in enumerate((blocks.rows, blocks.columns)):
        if length > 1:
            scale = scale.repeat_interleave(length, dim).narrow(dim, 0, shape[dim])
    return scale


_SCALES_ALIGNMENT = 4
"""cuBLAS reads rows of scales of 128 × 128 blocks at a stride that is a multiple of this number of scales."""
_TILE_ROWS = 128
"""Rows of a tile of scales of 1 × 32 blocks."""
_PROBE = 256
"""Rows and columns of the GEMM that probes a device: whole blocks of every kind."""


def scaled_product(
    left: Quantized,
    right: Quantized,
    out_dtype: torch.dtype,
    bias: torch.Tensor | None = None,
    library: str = "auto",
    *,
    narrow: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``left @ right.T + bias`` with accumulation in float32.

    With ``narrow`` a float32 result of a device's GEMM that rounds to bfloat16 stays in bfloat16. A result of
    ``out_dtype`` may be written to ``out``, which is then returned.

    Blocks of both operands extend along the columns. Native FP8 GEMMs are used if the GPU supports them for these
    blocks, otherwise float32 GEMMs of the dequantized values. On CPU native FP8 GEMMs are slower than float32.

    Shapes: ``left: [a, n]``, ``right: [b, n]``, ``bias: [b] -> [a, b]``.
    """
    if left.data.is_cuda and left.has_device_product(right):
        result = left.device_product(right, out_dtype, narrow=narrow, out=out)
        return result if bias is None else result + bias
    result = linear(left.values(), right.values(), None if bias is None else bias.float(), library)
    return result.to(out_dtype)


def device_product(
    left: Quantized,
    right: Quantized,
    out_dtype: torch.dtype,
    *,
    narrow: bool = False,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Compute ``left @ right.T`` with torch's scaled GEMM; raises RuntimeError if it is unsupported.

    ``narrow`` and ``out`` as in `scaled_product`.

    Shapes: ``left: [a, n]``, ``right: [b, n] -> [a, b]``.
    """
    if right.blocks == SQUARES_OF_128:
        return in_dtype(_product_with_squares(left, right, torch.bfloat16), out_dtype, narrow)
    operands = scaled_operands(left, right, out_dtype)
    if out is not None and operands.out_dtype is out_dtype:
        return torch._scaled_mm(**operands._asdict(), out=out)
    return in_dtype(torch._scaled_mm(**operands._asdict()), out_dtype, narrow)


class ScaledOperands(NamedTuple):
    """Arguments of torch's scaled GEMM."""

    input: torch.Tensor
    mat2: torch.Tensor
    scale_a: torch.Tensor
    scale_b: torch.Tensor
    out_dtype: torch.dtype


def scaled_operands(left: Quantized, right: Quantized, out_dtype: torch.dtype) -> ScaledOperands:
    """Return the arguments of torch's scaled GEMM for ``left @ right.T``, with the dtype that it can write.

    Scales of the right operand are not those of 128 × 128 blocks.
    """
    computed_dtype = out_dtype
    if left.blocks == WHOLE:
        left_scale, right_scale = (scale.reshape(()) for scale in (left.scale, right.scale))
    elif left.blocks == SEGMENTS_OF_32:
        left_scale, right_scale = (
            each.scale.reshape(-1) if each.has_tiles else swizzled(each.scale.to(torch.float8_e8m0fnu))
            for each in (left, right)
        )
        computed_dtype = torch.bfloat16
    else:
        # On CUDA scales of rows and segments are column-major.
        left_scale = left.scale if left.blocks == ROWS else left.scale.t().contiguous().t()
        right_scale = right.scale.t().contiguous()
        computed_dtype = torch.bfloat16 if left.data.is_cuda else out_dtype
    data = left.data.contiguous(), right.data.contiguous().t()
    return ScaledOperands(*data, left_scale, right_scale, computed_dtype)


def in_dtype(result: torch.Tensor, dtype: torch.dtype, narrow: bool) -> torch.Tensor:
    """Convert a device's result; with ``narrow`` one that is to become float32 is returned as it is."""
    return result if narrow and dtype is torch.float32 else result.to(dtype)


def _product_with_squares(left: Quantized, right: Quantized, dtype: torch.dtype) -> torch.Tensor:
    """Compute ``left @ right.T`` if the right operand has one scale per 128 × 128 block.

    ``torch._scaled_mm`` accepts densely packed scales, which cuBLAS misreads unless a row has a multiple of four scales
    (pytorch/pytorch #166752). ``F.scaled_mm``, which takes named scaling types, requires padded rows.
    """
    missing = -right.scale.shape[1] % _SCALES_ALIGNMENT
    filled = F.pad(right.scale, (0, missing)) if missing else right.scale.contiguous()
    return F.scaled_mm(
        left.data.contiguous(),
        right.data.contiguous().t(),
        left.scale.t().contiguous().t(),
        ScalingType.BlockWise1x128,
        filled.t(),
        ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )


def has_scaled_products(blocks: Blocks, weight_blocks: Blocks, device: str) -> bool:
    """Return whether a device type has native FP8 GEMMs for operands quantized with these blocks."""
    return _probed(blocks, weight_blocks, E4M3, E4M3, device)


def _has_scaled_product(left: Quantized, right: Quantized) -> bool:
    fits = left.blocks.fit(left.data.shape) and right.blocks.fit(right.data.shape)
    return fits and _probed(left.blocks, right.blocks, left.data.dtype, right.data.dtype, left.data.device.type)


@functools.cache
def _probed(left: Blocks, right: Blocks, left_dtype: torch.dtype, right_dtype: torch.dtype, device: str) -> bool:
    """Run one GEMM and return whether it succeeds."""
    x = torch.ones(_PROBE, _PROBE, device=device)
    try:
        device_product(quantize(x, left_dtype, left), quantize(x, right_dtype, right), torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


def swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Return one-byte scales in cuBLAS's swizzled layout: tiles of 128 × 4, in which every 32nd row is contiguous.

    Scale ``(r, c)`` of a tile is at ``16 (r mod 32) + 4 (r div 32) + c``. Missing rows and columns are zero.

    Shapes: ``[n, m] -> [128 * 4 * tiles]``.
    """
    tiles = math.ceil(scale.shape[0] / _TILE_ROWS), math.ceil(scale.shape[1] / 4)
    padded = torch.zeros(_TILE_ROWS * tiles[0], 4 * tiles[1], dtype=torch.uint8, device=scale.device)
    padded[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    ordered = padded.view(tiles[0], 4, 32, tiles[1], 4).permute(0, 3, 2, 1, 4)
    return ordered.reshape(-1).view(scale.dtype)


def from_tiles(scale: torch.Tensor) -> torch.Tensor:
    """Return one-byte scales in two dimensions from rows of whole tiles.

    Shapes: ``[n / 128, 512 tiles] -> [n, 4 tiles]``.
    """
    tiles = scale.view(torch.uint8).view(len(scale), -1, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(len(scale) * _TILE_ROWS, -1).view(scale.dtype)
