"""Frozen weights in 4 bits per element, dequantized for each GEMM.

Blocks of 64 elements lie within a row, and groups of 256 scales along the dim that tensor parallelism does not split:
values do not depend on the layout. Dettmers et al. 2023, https://arxiv.org/abs/2305.14314.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import nn

from megatron.core.ops import (
    BLOCK_SIZE,
    GROUP_SIZE,
    dequantize_blocks,
    dequantize_scales,
    make_tables,
    quantize_blocks,
    quantize_scales,
)
from megatron.core.sharding import Box, ParamSpec, Shard, quantized_of, spec_of

CODES, SCALES, LARGEST, MEAN = "codes", "absmax", "absmax_scale", "absmax_mean"
"""Names of the stored tensors after the name of the weight."""
STORED_PARTS = (CODES, SCALES, LARGEST, MEAN)


class QuantizedWeight:
    """4-bit values of a frozen weight ``[..., out, in]``; implements `QuantizedStorage`.

    ``kind`` is nf4 or fp4. Scales are quantized too if they are ``doubly`` quantized, in groups along ``group_dim`` (-1
    or -2), which must not be sharded. The number of input features of a rank must be a multiple of 64. The weight's own
    memory is freed.
    """

    def __init__(self, weight: nn.Parameter, kind: str, *, doubly: bool, group_dim: int) -> None:
        self.kind, self.group_dim = kind, group_dim
        self._tables = make_tables(kind, weight.device)
        self._weight = weight
        *rows, length = weight.shape
        assert length % BLOCK_SIZE == 0, f"rows of {length} elements are not whole blocks"

        def make(shape: list[int], dtype: torch.dtype) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device=weight.device)

        scales = [*rows, length // BLOCK_SIZE]
        groups = [*scales]
        groups[group_dim] = -(-groups[group_dim] // GROUP_SIZE)
        self.tensors: Mapping[str, torch.Tensor] = {
            CODES: make([*rows, length // 2], torch.uint8),
            SCALES: make(scales, torch.uint8 if doubly else torch.float32),
            **({LARGEST: make(groups, torch.float32), MEAN: make(groups, torch.float32)} if doubly else {}),
        }
        weight.quantized = self  # type: ignore[attr-defined]
        self._is_open = False
        self._free()

    def held(self) -> tuple[tuple[ParamSpec, torch.Tensor], ...]:
        """Return codes and scales with their descriptions, or the weight itself while it is open."""
        spec = spec_of(self._weight)
        if self._is_open:
            return ((spec, self._weight),)
        units = {CODES: {-1: 2}, SCALES: {-1: BLOCK_SIZE}}
        grouped = {-1: BLOCK_SIZE * GROUP_SIZE} if self.group_dim == -1 else {-1: BLOCK_SIZE, -2: GROUP_SIZE}
        return tuple((_in_units(spec, name, units.get(name, grouped)), each) for name, each in self.tensors.items())

    def dense(self) -> torch.Tensor:
        """Return the dequantized weight."""
        scales = self.tensors[SCALES]
        if LARGEST in self.tensors:
            scales = dequantize_scales(scales, self.tensors[LARGEST], self.tensors[MEAN], self._tables, self.group_dim)
        return dequantize_blocks(self.tensors[CODES], scales, self._tables, self._weight.dtype)

    def open(self) -> None:
        """Allocate the weight's memory, uninitialized."""
        self._is_open = True
        self._weight.untyped_storage().resize_(self._weight.numel() * self._weight.element_size())

    @torch.no_grad()
    def close(self) -> None:
        """Quantize the weight's values and free its memory."""
        codes, scales = quantize_blocks(self._weight.detach(), self.kind)
        found = {CODES: codes, SCALES: scales}
        if LARGEST in self.tensors:
            found[SCALES], found[LARGEST], found[MEAN] = quantize_scales(scales, self.group_dim)
        for name, values in found.items():
            self.tensors[name].copy_(values)
        self._is_open = False
        self._free()

    def _free(self) -> None:
        if not self._weight.is_meta:
            self._weight.untyped_storage().resize_(0)


def _in_units(spec: ParamSpec, name: str, units: Mapping[int, int]) -> ParamSpec:
    """Describe a tensor with one element per unit of a weight: ``units`` gives the length of a unit along each dim."""
    num_dims = len(spec.global_shape)
    lengths = [units.get(dim - num_dims, 1) for dim in range(num_dims)]

    def starts(offset: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(start // length for start, length in zip(offset, lengths))

    def counts(shape: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(-(-size // length) for size, length in zip(shape, lengths))

    shards = tuple(
        Shard(Box(starts(shard.global_box.offset), counts(shard.global_box.shape)), starts(shard.local_offset))
        for shard in spec.shards
    )
    return replace(spec, name=f"{spec.name}.{name}", global_shape=counts(spec.global_shape), shards=shards)


class _Stacked:
    """Weights whose rows are one weight in a GEMM; only `dense` is used."""

    def __init__(self, *weights: nn.Parameter) -> None:
        self._weights = weights

    def dense(self) -> torch.Tensor:
        found = [quantized_of(weight) for weight in self._weights]
        return torch.cat([each.dense() for each in found if each is not None])


def stacked_weights(*weights: nn.Parameter) -> torch.Tensor:
    """Return the rows of all weights as the weight of one GEMM; quantized weights have no values before the GEMM."""
    if quantized_of(weights[0]) is None:
        return torch.cat(weights)
    rows = sum(weight.shape[0] for weight in weights)
    stacked = torch.empty((), dtype=weights[0].dtype, device=weights[0].device).expand(rows, weights[0].shape[1])
    stacked.quantized = _Stacked(*weights)  # type: ignore[attr-defined]
    return stacked
