"""4-bit quantization of weights in blocks of 64 elements (NF4, FP4), and of the blocks' scales (double quantization).

Codes and values are those of bitsandbytes, whose kernel dequantizes on CUDA if the package is installed. Dettmers et
al. 2023, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

BLOCK_SIZE = 64
"""Consecutive elements of a row that share one scale, their largest absolute value (absmax)."""
GROUP_SIZE = 256
"""Scales that are quantized together."""
LEVELS = {
    "nf4": (
        *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453),
        *(-0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0),
        *(0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224),
        *(0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
    ),
    "fp4": (
        *(0.0, 0.0052083334885537624, 0.6666666865348816, 1.0, 0.3333333432674408, 0.5, 0.1666666716337204, 0.25),
        *(0.0, -0.0052083334885537624, -0.6666666865348816, -1.0),
        *(-0.3333333432674408, -0.5, -0.1666666716337204, -0.25),
    ),
}
"""Values of the 16 codes of each type, as fractions of a block's scale."""
_FLOOR = 1.0e-38
_CHUNK_BLOCKS = 1 << 16
"""Blocks that are converted at once, which bounds the memory of intermediate results."""


@dataclass(frozen=True, eq=False)
class Tables:
    """Values of codes on a device; ``kind`` is nf4 or fp4.

    Shapes: ``pairs: [256, 2]``, the two values of every byte, the first from its upper four bits; ``scales: [256]``,
    the 8-bit dynamic type in ascending order (Dettmers 2015, https://arxiv.org/abs/1511.04561).
    """

    kind: str
    pairs: torch.Tensor
    scales: torch.Tensor


def make_tables(kind: str, device: torch.device) -> Tables:
    """Create the tables of a type on a device."""
    levels = LEVELS[kind]
    pairs = [(levels[byte >> 4], levels[byte & 15]) for byte in range(256)]
    return Tables(kind, _tensor(pairs, device), _tensor(_scale_levels(), device))


def _tensor(values: Sequence[Any], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=device)


@functools.cache
def _scale_levels() -> tuple[float, ...]:
    positive: list[float] = []
    for exponent in range(7):
        edges = torch.linspace(0.1, 1.0, 2**exponent + 1, dtype=torch.float32, device="cpu")
        positive += (10.0 ** (exponent - 6) * ((edges[:-1] + edges[1:]) / 2.0)).tolist()
    return tuple(sorted([*positive, *(-value for value in positive), 0.0, 1.0]))


def _midpoints(levels: torch.Tensor) -> torch.Tensor:
    return (levels[:-1] + levels[1:]) / 2


def _normalized(values: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    return (values * (1.0 / largest.clamp(min=_FLOOR)).unsqueeze(-1)).clamp_(-1.0, 1.0)


def quantize_blocks(values: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize rows in blocks of 64 elements; ``kind`` is nf4 or fp4.

    Shapes: ``values: [..., n]`` with n a multiple of 64 ``-> codes: [..., n/2] uint8``, two per byte, and
    ``absmax: [..., n/64] float32``.
    """
    *rows, length = values.shape
    order = sorted(range(16), key=LEVELS[kind].__getitem__)
    bounds = _midpoints(_tensor([LEVELS[kind][code] for code in order], values.device))
    codes_of = torch.tensor(order, dtype=torch.uint8, device=values.device)
    codes = torch.empty((*rows, length // 2), dtype=torch.uint8, device=values.device)
    absmax = torch.empty((*rows, length // BLOCK_SIZE), dtype=torch.float32, device=values.device)
    parts = (values.reshape(-1, BLOCK_SIZE), codes.view(-1, BLOCK_SIZE // 2), absmax.view(-1))
    for blocks, into, scales in zip(*(torch.split(part, _CHUNK_BLOCKS) for part in parts)):
        blocks = blocks.float()
        scales.copy_(blocks.abs().amax(dim=1))
        found = codes_of[torch.bucketize(_normalized(blocks, scales), bounds, out_int32=True)]
        torch.bitwise_or(found[:, ::2] << 4, found[:, 1::2], out=into)
    return codes, absmax


def dequantize_blocks(codes: torch.Tensor, absmax: torch.Tensor, tables: Tables, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of codes: level x absmax in float32, rounded to ``dtype``.

    Shapes: ``codes: [..., n/2] uint8``, ``absmax: [..., n/64] float32 -> [..., n]``.
    """
    if codes.is_cuda and dtype != torch.float64 and load_bitsandbytes() is not None:
        return library_dequantize(codes, absmax, tables.kind, dtype)
    output = torch.empty((*codes.shape[:-1], 2 * codes.shape[-1]), dtype=dtype, device=codes.device)
    parts = (codes.reshape(-1, BLOCK_SIZE // 2), absmax.reshape(-1, 1), output.view(-1, BLOCK_SIZE))
    for packed, scales, into in zip(*(torch.split(part, _CHUNK_BLOCKS) for part in parts)):
        into.copy_(F.embedding(packed.int(), tables.pairs).view(-1, BLOCK_SIZE).mul_(scales))
    return output


def library_dequantize(codes: torch.Tensor, absmax: torch.Tensor, kind: str, dtype: torch.dtype) -> torch.Tensor:
    """Compute `dequantize_blocks` with the kernel of bitsandbytes, which must be installed."""
    library, shape = load_bitsandbytes(), torch.Size((*codes.shape[:-1], 2 * codes.shape[-1]))
    state = library.QuantState(
        absmax=absmax.reshape(-1), shape=shape, dtype=dtype, blocksize=BLOCK_SIZE, quant_type=kind
    )
    values: torch.Tensor = library.dequantize_4bit(codes.reshape(-1, 1), state)
    return values


@functools.cache
def load_bitsandbytes() -> Any:
    """Return ``bitsandbytes.functional``, or None if the package is not installed."""
    if importlib.util.find_spec("bitsandbytes") is None:
        return None
    return importlib.import_module("bitsandbytes.functional")


def quantize_scales(absmax: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Quantize the scales of blocks to 8 bits, in groups of 256 along ``dim`` (-1 or -2), minus the mean of the group.

    The last group may be smaller. Means are exact sums rounded once, so that they do not depend on the layout.

    Shapes: ``absmax: [..., m, n] -> codes: [..., m, n] uint8``, ``largest`` and ``mean``: ``[..., m, n]`` float32 with
    one entry per group along ``dim``.
    """
    bounds = _midpoints(_tensor(_scale_levels(), absmax.device))
    codes, largest, means = [], [], []
    for group in torch.split(absmax.transpose(dim, -1).contiguous(), GROUP_SIZE, dim=-1):
        mean = group.mean(dim=-1, dtype=torch.float64).float()
        centered = group - mean.unsqueeze(-1)
        top = centered.abs().amax(dim=-1)
        codes.append(torch.bucketize(_normalized(centered, top).contiguous(), bounds, out_int32=True).to(torch.uint8))
        largest.append(top)
        means.append(mean)
    joined = torch.cat(codes, dim=-1), torch.stack(largest, dim=-1), torch.stack(means, dim=-1)
    return tuple(part.transpose(dim, -1).contiguous() for part in joined)  # type: ignore[return-value]


def dequantize_scales(
    codes: torch.Tensor, largest: torch.Tensor, mean: torch.Tensor, tables: Tables, dim: int, start: int = 0
) -> torch.Tensor:
    """Return the scales of blocks from `quantize_scales`, or of those from ``start`` along ``dim`` on.

    ``largest`` and ``mean`` begin with the group of ``start``.

    Shapes: ``codes: [..., m, n] uint8 -> [..., m, n]`` float32.
    """
    first = start // GROUP_SIZE * GROUP_SIZE
    places = torch.arange(start - first, start - first + codes.shape[dim], device=codes.device) // GROUP_SIZE
    values = F.embedding(codes.int(), tables.scales.unsqueeze(1)).squeeze(-1)
    return values.mul_(largest.index_select(dim, places)).add_(mean.index_select(dim, places))
