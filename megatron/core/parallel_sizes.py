"""The grid of ranks as data: its axes and their sizes, where a rank stands in it, and which ranks form a slice of it.

Importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

Grid = Mapping[str, int]
"""One factorisation of all ranks: the size of each axis, from the slowest to the fastest varying."""

Place = Mapping[str, int]
"""Where a rank stands in a grid: its coordinate along each axis."""


def place_of(grid: Grid, rank: int) -> dict[str, int]:
    """Return the coordinates of a rank, axis by axis in the order of the grid."""
    place = {}
    for axis in reversed(tuple(grid)):
        rank, place[axis] = divmod(rank, grid[axis])
    return {axis: place[axis] for axis in grid}


def slice_ranks(grid: Grid, axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Return the ranks that differ from ``rank`` only along ``axes``, in grid order.

    The cost grows with the slice, not with the world.
    """
    strides, stride = {}, 1
    for axis in reversed(tuple(grid)):
        strides[axis] = stride
        stride *= grid[axis]
    base = rank - sum(rank // strides[axis] % grid[axis] * strides[axis] for axis in axes)
    ranks = [base]
    for axis in grid:
        if axis in axes:
            ranks = [r + i * strides[axis] for r in ranks for i in range(grid[axis])]
    return tuple(ranks)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParallelSizes:
    """Hold the size of every axis of the grid, from the slowest to the fastest varying.

    Neighbouring ranks share a tensor-parallel group. One copy of the model takes ``pp * cp * tp`` ranks.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1

    @property
    def grid(self) -> Grid:
        """Return the sizes by axis."""
        return {axis: getattr(self, axis) for axis in GRID_AXES}

    @property
    def world_size(self) -> int:
        """Return the number of ranks of the grid."""
        return self.size_of(GRID_AXES)

    @property
    def num_replicas(self) -> int:
        """Return the number of ranks that hold the same weights: ``dp * cp``."""
        return self.dp * self.cp

    def size_of(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks of a slice along ``axes``."""
        return math.prod(getattr(self, axis) for axis in axes)

    def place(self, rank: int = 0) -> Place:
        """Return the coordinates of a rank."""
        return place_of(self.grid, rank)

    def in_world(self, world_size: int) -> ParallelSizes:
        """Return the same layout of the model in a world of that many ranks: ``dp`` is the number of whole copies."""
        copy = dataclasses.replace(self, dp=1)
        return dataclasses.replace(copy, dp=world_size // max(copy.world_size, 1))

    def problems(self, world_size: int) -> list[str]:
        """Return what keeps the grid from having exactly ``world_size`` ranks, one line or none."""
        if self.world_size == world_size:
            return []
        copy = dataclasses.replace(self, dp=1).world_size
        return [
            f"world size {world_size} is not divisible by tensor({self.tp}) x pipeline({self.pp}) x "
            f"context({self.cp}) = {copy}; "
            "change --tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size "
            f"or the number of processes (multiples of {copy} work)"
        ]

    def model_fields(self) -> dict[str, Any]:
        """Return the fields of a model's configuration that shard one copy of it."""
        return {name: getattr(self, axis) for axis, name in SIZE_NAMES.items() if name in MODEL_SIZE_NAMES}

    def record(self) -> dict[str, int]:
        """Return what a checkpoint records of the layout that wrote it."""
        return {name: getattr(self, axis) for axis, name in SIZE_NAMES.items()} | {"world_size": self.world_size}

    def describe(self) -> str:
        """Return every size in words, on one line."""
        words = {axis: name.removesuffix("_size").replace("_", "-") for axis, name in SIZE_NAMES.items()}
        return ", ".join(f"{word} size: {getattr(self, axis)}" for axis, word in words.items())


ONE_RANK = ParallelSizes()
"""The grid of a model that is not sharded."""

GRID_AXES: tuple[str, ...] = tuple(field.name for field in dataclasses.fields(ParallelSizes))
"""The axes in grid order."""

SIZE_NAMES: Mapping[str, str] = {
    "dp": "data_parallel_size",
    "cp": "context_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
}
"""What each axis's size is called in configurations and checkpoints."""

MODEL_SIZE_NAMES: tuple[str, ...] = tuple(name for axis, name in SIZE_NAMES.items() if axis != "dp")
"""The sizes that a model's configuration has; the data-parallel size follows from the world."""
