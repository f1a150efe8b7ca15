"""Matrices in 8-bit floating point, quantised with a scale for each block of elements.

Every scale is a power of two, so that scaling rounds nothing: a number becomes the same one at whichever scale, as long
as it is in range. Micikevicius et al. 2022, https://arxiv.org/abs/2209.05433; blocks of 32 (MX): Rouhani et al. 2023,
https://arxiv.org/abs/2310.10537.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.kernels.triton_choice import casts_to_float8, runs_on_triton

E4M3 = torch.float8_e4m3fn
E5M2 = torch.float8_e5m2
_SMALLEST_EXPONENT, _LARGEST_EXPONENT, _EXPONENT_BIAS = -126, 127, 127
_MANTISSA_BITS = 23


@dataclass(frozen=True)
class Blocks:
    """Say which elements of a matrix share a scale: blocks of so many rows and columns, 0 for all of them."""

    rows: int
    columns: int

    def fit(self, shape: torch.Size) -> bool:
        """Return whether blocks fill a matrix of a shape, with none cut off at its edges."""
        return all(length == 0 or size % length == 0 for size, length in zip(shape, (self.rows, self.columns)))


WHOLE = Blocks(0, 0)
ROWS = Blocks(1, 0)
SEGMENTS_OF_128 = Blocks(1, 128)
SQUARES_OF_128 = Blocks(128, 128)
SEGMENTS_OF_32 = Blocks(1, 32)


@dataclass(frozen=True, eq=False)
class Quantised:
    """Hold a matrix in fp8, and the scales by which its blocks are multiplied.

    Shapes: ``data: [n, m]``, ``scale``: float32, one number for each block in two dimensions.
    """

    data: torch.Tensor
    scale: torch.Tensor
    blocks: Blocks

    def values(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the numbers that the matrix stands for.

        Shapes: ``-> [n, m]``.
        """
        return self.data.to(dtype) * _spread(self.scale, self.blocks, self.data.shape).to(dtype)

    def transposed(self) -> Quantised:
        """Return the transpose, whose blocks are transposed too."""
        return Quantised(self.data.t(), self.scale.t(), Blocks(self.blocks.columns, self.blocks.rows))


def amax_of(x: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Return the largest absolute value of each block, of which those at the edges may be cut off.

    Shapes: ``[n, m] -> [blocks along n, blocks along m]`` float32.
    """
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
    """Return the smallest power of two by which values up to ``amax`` can be divided and lie in a format's range.

    ``margin`` more powers of two are left free. The scale of zeros is 1, that of what is not finite NaN.

    Shapes: ``[...] -> [...]`` float32.
    """
    mantissa, exponent = torch.frexp(amax.float() / torch.finfo(dtype).max)
    exponent = exponent - (mantissa == 0.5).int() + margin
    bits = exponent.clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT).int() + _EXPONENT_BIAS
    # By its bits: a power that a device computes may be off by one of them.
    scale = (bits << _MANTISSA_BITS).view(torch.float32)
    return torch.where(amax.isfinite(), torch.where(amax > 0, scale, 1.0), torch.nan)


def quantise(x: torch.Tensor, dtype: torch.dtype, blocks: Blocks, scale: torch.Tensor | None = None) -> Quantised:
    """Round a matrix to fp8, by its own scales or by a given one; what is out of range is cut off.

    What is not finite becomes NaN, so that it is not lost.

    Shapes: ``x: [n, m]``, ``scale`` as of `Quantised`.
    """
    if scale is None:
        scale = scale_of(amax_of(x, blocks), dtype)
    return Quantised(_cast(x, dtype, _spread(scale, blocks, x.shape)), scale, blocks)


def quantise_whole(
    x: torch.Tensor,
    dtype: torch.dtype,
    scale: torch.Tensor,
    amax: torch.Tensor | None,
    *,
    plain: bool = True,
    transpose: bool,
) -> tuple[Quantised | None, Quantised | None]:
    """Round a matrix (``plain``), its transpose or both to fp8 by one scale; on CUDA, rows lie together in both.

    ``amax`` is raised to the matrix's largest absolute value. With Triton all of it is one pass over ``x``.

    Shapes: ``x: [n, m]``, ``scale: [1, 1]``, ``amax: []``.
    """
    data, turned = _cast_whole(x, dtype, scale, amax, plain, transpose)
    return tuple(None if part is None else Quantised(part, scale, WHOLE) for part in (data, turned))  # type: ignore[return-value]


def _cast_whole(
    x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor, amax: torch.Tensor | None, plain: bool, transpose: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    if runs_on_triton(x) and casts_to_float8(x.device.type) and dtype in (E4M3, E5M2):
        from megatron.core.kernels.triton_programs.float8_cast import cast_and_transpose

        return cast_and_transpose(x, dtype, scale, amax, plain, transpose)
    if amax is not None:
        amax.copy_(torch.maximum(amax, x.detach().abs().amax().float()))
    data = _cast(x, dtype, scale)
    return (data if plain else None), (data.t() if transpose else None)


def _cast(x: torch.Tensor, dtype: torch.dtype, scale: torch.Tensor) -> torch.Tensor:
    limit = torch.finfo(dtype).max
    scaled = x.detach().float() / scale
    # Zero times what is not finite is NaN.
    return (scaled.clamp(-limit, limit) + scaled * 0.0).to(dtype)


def _spread(scale: torch.Tensor, blocks: Blocks, shape: torch.Size) -> torch.Tensor:
    """Return the scales so that they multiply a matrix of a shape element by element."""
    for dim, length in enumerate((blocks.rows, blocks.columns)):
        if length > 1:
            scale = scale.repeat_interleave(length, dim).narrow(dim, 0, shape[dim])
    return scale
