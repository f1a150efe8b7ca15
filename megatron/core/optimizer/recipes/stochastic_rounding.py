"""Rounding up or down by chance, so that what is rounded is right on average and small changes are not lost.

The chance is a hash of the number itself, of its place in its block and of the count of updates: the same at any
data-parallel size and after a resumption. Nothing is drawn from a generator.
"""

from __future__ import annotations

import torch

from megatron.core.distributed.param_layout import PARAM_ALIGNMENT

_FACTORS = (0x7FEB352D, 0x846CA68B - 2**32)
_LANE_STEP = 0x9E3779B1 - 2**32
_UPDATE_STEP = 0x85EBCA6B - 2**32
_DISCARDED_BITS = 16


def random_words(values: torch.Tensor, num_updates: torch.Tensor | int) -> torch.Tensor:
    """Return 16 random bits for each float32 number, as int32; rows of ``values`` are blocks.

    Shapes: ``values: [blocks, 128]``, ``num_updates: []`` or a number ``-> [blocks, 128]``.
    """
    lanes = torch.arange(PARAM_ALIGNMENT, dtype=torch.int32, device=values.device) * _LANE_STEP
    count = torch.as_tensor(num_updates, device=values.device).to(torch.int32) * _UPDATE_STEP
    words = values.view(torch.int32) ^ (lanes + count)
    for factor in _FACTORS:
        words = (words ^ ((words >> _DISCARDED_BITS) & 0xFFFF)) * factor
    return (words >> _DISCARDED_BITS) & 0xFFFF


def round_to_bfloat16(values: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return one of the two bfloat16 neighbours of each number, the nearer with the greater chance, as float32.

    Shapes: ``values, words: [blocks, 128] -> [blocks, 128]``.
    """
    return ((values.view(torch.int32) + words) & ~0xFFFF).view(torch.float32)


def round_roots(squares: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    """Return numbers of float8 (e4m3), as float32, whose squares are the given ones on average.

    Shapes: ``squares, words: [blocks, 128] -> [blocks, 128]``; squares from 0 to 2^16.
    """
    roots = squares.sqrt()
    # Of a float32 number without its fraction: the power of two below it. Units of e4m3 are an eighth of that.
    powers = (roots.view(torch.int32) & 0x7F800000).view(torch.float32)
    units = (powers * 2.0**-3).clamp_(min=2.0**-9)
    lower = torch.floor(roots / units) * units
    shares = (squares - lower.square()) / (units * (2.0 * lower + units))
    return lower + units * (words.to(torch.float32) * 2.0**-16 < shares)
