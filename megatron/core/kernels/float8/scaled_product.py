"""Products of matrices in fp8: by the device's own kernels, or by float32 ones of the numbers that they hold."""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch.nn.functional import ScalingType

from megatron.core.kernels.float8.quantised import (
    E4M3,
    ROWS,
    SEGMENTS_OF_32,
    SQUARES_OF_128,
    WHOLE,
    Blocks,
    Quantised,
    quantise,
)
from megatron.core.kernels.matrix_product import linear

_SCALES_ALIGNMENT = 4
"""Rows of scales of 128 × 128 blocks lie a multiple of so many scales apart, where cuBLAS reads them."""
_PROBE = 256
"""Rows and columns of the product by which a device is tried: whole blocks of every kind."""


def scaled_product(
    left: Quantised, right: Quantised, out_dtype: torch.dtype, bias: torch.Tensor | None = None, library: str = "auto"
) -> torch.Tensor:
    """Return ``left @ right.T + bias``, summed in float32.

    The blocks of both have their length along the columns. By the device's own fp8 products where it has them for
    these blocks, else by its float32 products of the same numbers: the CPU's fp8 products are slower than those.

    Shapes: ``left: [a, n]``, ``right: [b, n]``, ``bias: [b] -> [a, b]``.
    """
    if left.data.is_cuda and _has_scaled_product(left, right):
        result = device_product(left, right, out_dtype)
        return result if bias is None else result + bias
    result = linear(left.values(), right.values(), None if bias is None else bias.float(), library)
    return result.to(out_dtype)


def device_product(left: Quantised, right: Quantised, out_dtype: torch.dtype) -> torch.Tensor:
    """Return ``left @ right.T`` by torch's scaled product, or raise RuntimeError where there is none.

    Shapes: ``left: [a, n]``, ``right: [b, n] -> [a, b]``.
    """
    scales = left.scale, right.scale
    computed_dtype = out_dtype
    if right.blocks == SQUARES_OF_128:
        return _product_with_squares(left, right, torch.bfloat16).to(out_dtype)
    if left.blocks == WHOLE:
        left_scale, right_scale = (scale.reshape(()) for scale in scales)
    elif left.blocks == SEGMENTS_OF_32:
        left_scale, right_scale = (_swizzled(scale.to(torch.float8_e8m0fnu)) for scale in scales)
        computed_dtype = torch.bfloat16
    else:
        # Rows' and segments' scales lie column by column on CUDA.
        left_scale = left.scale if left.blocks == ROWS else left.scale.t().contiguous().t()
        right_scale = right.scale.t().contiguous()
        computed_dtype = torch.bfloat16 if left.data.is_cuda else out_dtype
    result = torch._scaled_mm(
        left.data.contiguous(),
        right.data.contiguous().t(),
        left_scale,
        right_scale,
        out_dtype=computed_dtype,
    )
    return result.to(out_dtype)


def _product_with_squares(left: Quantised, right: Quantised, dtype: torch.dtype) -> torch.Tensor:
    """Return ``left @ right.T`` where the right operand has a scale for each 128 × 128 numbers.

    ``torch._scaled_mm`` lets their scales lie close together, where cuBLAS reads others unless a row has a multiple of
    four (pytorch/pytorch #166752); the function with named scales asks for rows that are filled up.
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
    """Return whether a kind of device has products of its own for operands quantised in these blocks."""
    return _probed(blocks, weight_blocks, E4M3, E4M3, device)


def _has_scaled_product(left: Quantised, right: Quantised) -> bool:
    fits = left.blocks.fit(left.data.shape) and right.blocks.fit(right.data.shape)
    return fits and _probed(left.blocks, right.blocks, left.data.dtype, right.data.dtype, left.data.device.type)


@functools.cache
def _probed(left: Blocks, right: Blocks, left_dtype: torch.dtype, right_dtype: torch.dtype, device: str) -> bool:
    """Compute one product, and return whether that succeeds."""
    x = torch.ones(_PROBE, _PROBE, device=device)
    try:
        device_product(quantise(x, left_dtype, left), quantise(x, right_dtype, right), torch.bfloat16)
    except (RuntimeError, ValueError):
        return False
    return True


def _swizzled(scale: torch.Tensor) -> torch.Tensor:
    """Return scales in the order in which cuBLAS reads them: tiles of 128 × 4, each row by row of every 32nd together.

    Scale ``(r, c)`` of a tile is at ``16 (r mod 32) + 4 (r div 32) + c``. Rows and columns that are missing are zero.

    Shapes: ``[n, m] -> [128 * 4 * tiles]``.
    """
    tiles = math.ceil(scale.shape[0] / 128), math.ceil(scale.shape[1] / 4)
    padded = torch.zeros(128 * tiles[0], 4 * tiles[1], dtype=torch.uint8, device=scale.device)
    padded[: scale.shape[0], : scale.shape[1]] = scale.view(torch.uint8)
    ordered = padded.view(tiles[0], 4, 32, tiles[1], 4).permute(0, 3, 2, 1, 4)
    return ordered.reshape(-1).view(torch.float8_e8m0fnu)
