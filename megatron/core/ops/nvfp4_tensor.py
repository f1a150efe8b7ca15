"""NVFP4 matrices: 4-bit floating point (E2M1) with an E4M3 scale per 16 elements and a float32 scale per tensor.

NVIDIA 2025, https://arxiv.org/abs/2509.25149. The scale of a tensor is a power of two, like the scales of FP8: while
the scale of a block is a normal E4M3 number, the quantized value of an element depends only on its block, and not on
the part of the matrix that a rank holds. GEMMs run on the device's native NVFP4 kernels, or in float32 on the
dequantized values.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType, SwizzleType

from megatron.core.ops.dropout import RowKeys, keyed_words
from megatron.core.ops.fp8_tensor import (
    E4M3,
    SEGMENTS_OF_16,
    SQUARES_OF_16,
    Blocks,
    Quantized,
    amax_of,
    from_tiles,
    in_dtype,
    scale_of,
    swizzled,
)
from megatron.core.ops.triton_support import casts_on_triton

SEGMENT = SEGMENTS_OF_16.columns
"""Elements along the summed dimension that share an E4M3 scale, and that a Hadamard transform mixes."""

_LARGEST = 6.0
_LARGEST_SCALE = torch.finfo(E4M3).max
_SIGN = 8
"""The codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4 and 6, and the codes from 8 are their negatives."""
_UNIFORM_BITS = 24
SIGNS = 0b1101_0001_0011_0110
"""Random signs of the Hadamard transform, the same in all layers and steps; bit ``i`` is set if sign ``i`` is -1."""


@dataclass(frozen=True, eq=False)
class Nvfp4Matrix(Quantized):
    """A matrix in NVFP4: two codes per byte along the columns, the first one in the low bits.

    Scales of segments may be in the layout that cuBLAS reads, in tiles of 128 × 4 scales, one row of tiles per row.
    Like the matrix, they can be concatenated along either dim.

    Shapes: ``data: [n, m / 2]`` uint8, ``scale``: E4M3, one number per block, in two dimensions, in tiles ``[n / 128, 8
    m]``, ``tensor_scale: [1, 1]`` float32.
    """

    tensor_scale: torch.Tensor

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the dequantized matrix.

        Shapes: ``-> [n, m]``.
        """
        codes = unpack(self.data)
        scale = _spread(self.block_scales().to(dtype) * self.tensor_scale.to(dtype), self.blocks)
        index = (codes & (_SIGN - 1)).to(dtype)
        # Values are not looked up, because a table would be copied from host memory.
        magnitude = torch.where(index <= 4, index / 2, torch.where(index <= 6, index - 2, _LARGEST))
        return torch.where(codes < _SIGN, magnitude, -magnitude) * scale

    def block_scales(self) -> torch.Tensor:
        """Return the scales in two dimensions, one number per block."""
        return from_tiles(self.scale) if self.has_tiles else self.scale

    @property
    def has_tiles(self) -> bool:
        return self.blocks.rows == 1 and len(self.scale) < len(self.data)

    def transposed(self) -> Nvfp4Matrix:
        """Return the transpose of a matrix with square blocks."""
        assert self.blocks == SQUARES_OF_16, "segments along the rows are not segments along the columns"
        data = pack(unpack(self.data).t())
        return Nvfp4Matrix(data, self.scale.t(), self.blocks, self.tensor_scale)

    @property
    def form(self) -> Callable[[torch.Tensor, torch.Tensor], Quantized]:
        """Return a function that makes a matrix with the same blocks and tensor scale from its data and scales."""
        return partial(Nvfp4Matrix, blocks=self.blocks, tensor_scale=self.tensor_scale)

    def has_device_product(self, right: Quantized) -> bool:
        """Return whether the device multiplies this matrix by the transpose of ``right`` natively."""
        return has_nvfp4_products(self.data.device.type)

    def device_product(
        self, right: Quantized, out_dtype: torch.dtype, *, narrow: bool = False, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute ``self @ right.T`` with torch's scaled GEMM; raises RuntimeError if it is unsupported.

        The result is always new: ``out`` is not written.

        Shapes: ``self: [a, n]``, ``right: [b, n] -> [a, b]``.
        """
        assert isinstance(right, Nvfp4Matrix), "both operands are in NVFP4"
        scaling = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
        layout = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
        result = F.scaled_mm(
            self.data.contiguous().view(torch.float4_e2m1fn_x2),
            right.data.contiguous().view(torch.float4_e2m1fn_x2).t(),
            [self._device_scales(), self.tensor_scale.reshape(())],
            scaling,
            [right._device_scales(), right.tensor_scale.reshape(())],
            scaling,
            swizzle_a=layout,
            swizzle_b=layout,
            output_dtype=torch.bfloat16,
        )
        return in_dtype(result, out_dtype, narrow)

    def _device_scales(self) -> torch.Tensor:
        """Return the scale of each segment of each row in cuBLAS's layout, also if several rows share a scale."""
        if self.has_tiles:
            return self.scale.reshape(-1)
        if self.blocks.rows == 1:
            return swizzled(self.scale)
        return swizzled(self.scale.view(torch.uint8).repeat_interleave(self.blocks.rows, 0).view(E4M3))


def tensor_scale_of(amax: torch.Tensor) -> torch.Tensor:
    """Return the smallest power of two with which the scale of a block with this amax is in the range of E4M3.

    Shapes: ``[...] -> [1, 1]`` float32, of one number.
    """
    return scale_of(amax.reshape(1, 1) / _LARGEST, E4M3)


def quantize_nvfp4(
    x: torch.Tensor,
    blocks: Blocks,
    tensor_scale: torch.Tensor | None = None,
    words: torch.Tensor | None = None,
) -> Nvfp4Matrix:
    """Quantize a matrix to NVFP4 with the scale of its own amax or a given one; values out of range saturate.

    Values are rounded to nearest even, or stochastically with a random 32-bit word per element. The scales of blocks
    are rounded to nearest, so that the largest values of a block may be out of range, too. The scales of non-finite
    values are NaN, so that they are not hidden.

    Shapes: ``x: [n, m]``, ``tensor_scale: [1, 1]``, ``words: [n, m]`` int32; blocks divide the matrix evenly.
    """
    assert blocks.fit(x.shape), f"blocks {blocks} do not divide a matrix of shape {tuple(x.shape)}"
    x = x.detach().float()
    if tensor_scale is None:
        tensor_scale = tensor_scale_of(x.abs().amax())
    # Both steps of scaling are multiplications, the first one by a power of two, as in the kernel.
    x = x * (1.0 / tensor_scale)
    largest = amax_of(x, blocks) * (1.0 / _LARGEST)
    # Non-finite values times zero are NaN.
    scale = (largest.clamp(max=_LARGEST_SCALE) + largest * 0.0).to(E4M3)
    inverse = torch.where(scale.float() == 0, 0.0, 1.0 / scale.float())
    codes = _codes(x * _spread(inverse, blocks), words)
    return Nvfp4Matrix(pack(codes), scale, blocks, tensor_scale)


def amaxes(x: torch.Tensor, *, plain: bool, transpose: bool) -> torch.Tensor:
    """Return the largest absolute values of a matrix (``plain``), of its Hadamard-transformed transpose, or of both.

    They are not finite if a value is not. On Triton one kernel reads ``x`` once, and the transform is not stored.

    Shapes: ``x: [n, m] -> [1]`` or ``[2]`` float32.
    """
    if casts_on_triton(x):
        from megatron.core.ops.triton import nvfp4_amaxes

        return nvfp4_amaxes(x, SIGNS, plain=plain, transpose=transpose)
    return torch.stack([side.abs().amax().float() for side in _sides(x.detach(), plain, transpose)])


def quantize_segments(
    x: torch.Tensor,
    amax: torch.Tensor,
    random: tuple[RowKeys, torch.Tensor] | None = None,
    *,
    plain: bool,
    transpose: bool,
) -> list[Nvfp4Matrix]:
    """Quantize a matrix (``plain``), its Hadamard-transformed transpose, or both, in segments of 16 along their rows.

    ``amax`` is the result of `amaxes`. Values are rounded to nearest, or stochastically by keys per row of ``x`` for
    each of the results, and by the columns of ``x``. On Triton one kernel reads ``x`` once.

    Shapes: ``x: [n, m]``, keys ``[results, n]``, columns ``[m] -> [n, m]`` and ``[m, n]``.
    """
    if casts_on_triton(x):
        from megatron.core.ops.triton import cast_to_nvfp4

        drawn = None if random is None else (*random[0], random[1])
        parts = cast_to_nvfp4(x, amax, SIGNS, drawn, plain=plain, transpose=transpose)
        return [_of_segments(*part) for part in parts if part is not None]
    quantized = []
    for number, (side, is_turned) in enumerate(zip(_sides(x.detach(), plain, transpose), (not plain, True))):
        words = None if random is None else keyed_words(RowKeys(*(key[number] for key in random[0])), random[1])
        if words is not None and is_turned:
            words = words.t()
        quantized.append(quantize_nvfp4(side, SEGMENTS_OF_16, tensor_scale_of(amax[number]), words))
    return quantized


def quantize_squares(x: torch.Tensor, *, plain: bool, transpose: bool) -> list[Nvfp4Matrix]:
    """Quantize a matrix (``plain``), its transpose, or both, with a scale per 16 × 16 elements.

    On Triton one kernel reads ``x`` for the amax and one writes the results, whose segments of 16 elements have the
    scales of their squares.

    Shapes: ``x: [n, m] -> [n, m]`` and ``[m, n]``.
    """
    if casts_on_triton(x):
        from megatron.core.ops.triton import cast_to_nvfp4

        amax = amaxes(x, plain=True, transpose=False)
        parts = cast_to_nvfp4(x, amax, SIGNS, plain=plain, transpose=transpose, square=True)
        return [_of_segments(*part) for part in parts if part is not None]
    quantized = quantize_nvfp4(x, SQUARES_OF_16)
    return [side for side, is_wanted in ((quantized, plain), (quantized.transposed(), transpose)) if is_wanted]


def _sides(x: torch.Tensor, plain: bool, transpose: bool) -> list[torch.Tensor]:
    return [*([x] if plain else []), *([hadamard(x.t())] if transpose else [])]


def _of_segments(data: torch.Tensor, scale: torch.Tensor, tensor_scale: torch.Tensor) -> Nvfp4Matrix:
    return Nvfp4Matrix(data, scale, SEGMENTS_OF_16, tensor_scale)


def _codes(x: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
    """Return the code of each element, rounded to nearest even or by random words; larger values become 6.

    Shapes: ``[n, m] -> [n, m]`` uint8.
    """
    magnitude = x.abs()
    # The distance of neighboring values is 0.5 below 2, 1 below 4, then 2. All divisions are by powers of two.
    step = torch.where(magnitude < 2, 0.5, torch.where(magnitude < 4, 1.0, 2.0))
    steps = magnitude / step
    if words is None:
        rounded = steps.round() * step
    else:
        below = steps.floor()
        uniform = ((words >> (32 - _UNIFORM_BITS)) & ((1 << _UNIFORM_BITS) - 1)).float() * 2.0**-_UNIFORM_BITS
        rounded = (below + (uniform < steps - below)) * step
    # The codes of 0 to 2 are twice the value, those of 2 to 4 the value plus 2, and that of 6 and of NaN is 7.
    code = torch.where(rounded <= 2, 2 * rounded, torch.where(rounded <= 4, rounded + 2, 7.0))
    return (code + _SIGN * x.signbit()).to(torch.uint8)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Pack two neighboring codes of a row into a byte, the first one in the low bits.

    Shapes: ``[n, m] -> [n, m / 2]`` uint8.
    """
    return codes[:, ::2] | (codes[:, 1::2] << 4)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """Return the codes of packed bytes.

    Shapes: ``[n, m / 2] -> [n, m]`` uint8.
    """
    return torch.stack((data & 0xF, data >> 4), dim=-1).flatten(-2)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """Multiply each segment of 16 elements of a row by random signs and then by the orthogonal Hadamard matrix.

    If both operands of a GEMM are transformed along the summed dimension, the product is unchanged. Additions are in
    float32, in the order of the fast transform.

    Shapes: ``[n, m] -> [n, m]`` float32.
    """
    length = x.shape[1]
    assert length % SEGMENT == 0, f"{length} columns are not divisible by {SEGMENT}"
    signs: torch.Tensor = 1.0 - 2.0 * ((SIGNS >> torch.arange(SEGMENT, device=x.device)) & 1)
    segments = x.float().reshape(-1, SEGMENT) * signs
    for _ in range(SEGMENT.bit_length() - 1):
        even, odd = segments[:, ::2], segments[:, 1::2]
        segments = torch.cat((even + odd, even - odd), dim=1)
    return segments.mul(SEGMENT**-0.5).reshape(x.shape)


def _spread(scale: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Expand the scales, so that they multiply a matrix elementwise."""
    if blocks.rows > 1:
        scale = scale.repeat_interleave(blocks.rows, 0)
    return scale.repeat_interleave(blocks.columns, 1)


_PROBE = 256


@functools.cache
def has_nvfp4_products(device: str) -> bool:
    """Run one GEMM and return whether a device type has native NVFP4 GEMMs."""
    one = quantize_nvfp4(torch.ones(_PROBE, _PROBE, device=device), SEGMENTS_OF_16)
    try:
        one.device_product(one, torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True
