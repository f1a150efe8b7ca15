"""The grid of ranks as data: its axes and their sizes, where a rank stands in it, and which ranks form a slice of it.

Importing this module imports no torch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from megatron.core.errors import choices

Grid = Mapping[str, int]
"""One factorization of all ranks: the size of each axis, from the slowest to the fastest varying."""

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

    Neighboring ranks share a tensor-parallel group. One copy of the model takes ``pp * cp * tp`` ranks.

    Experts have a factorization of their own of a stage's ``dp * cp * tp`` ranks: ``ep`` of them hold different
    experts, and ``etp`` cut each of these (None: as many as ``tp``). What is left are replicas of experts.
    """

    pp: int = 1
    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def expert_tp(self) -> int:
        """Return over how many ranks each expert is cut."""
        return self.tp if self.etp is None else self.etp

    @property
    def num_expert_replicas(self) -> int:
        """Return the number of ranks that hold the same experts."""
        return self.dp * self.cp * self.tp // (self.ep * self.expert_tp)

    @property
    def num_copies_apart(self) -> int:
        """Return into how many parts a stage's ranks fall of which each has whole copies, experts included.

        Data-parallel copies whose ranks compute with the same experts are in one part.
        """
        copy, experts = self.cp * self.tp, self.ep * self.expert_tp
        return self.dp * copy // math.lcm(copy, experts)

    @property
    def has_expert_grid(self) -> bool:
        """Tell whether the ranks that share experts are others than those that share the rest of a model."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def expert_grid(self) -> Grid:
        """Return the sizes of the axes along which experts are spread, from the slowest to the fastest varying."""
        return {"pp": self.pp, "edp": self.num_expert_replicas, "ep": self.ep, "etp": self.expert_tp}

    @property
    def grid(self) -> Grid:
        """Return the sizes by axis."""
        return {axis: getattr(self, axis) for axis in GRID_AXES}

    @property
    def world_size(self) -> int:
        return self.size_of(GRID_AXES)

    @property
    def num_replicas(self) -> int:
        """Return the number of ranks that hold the same weights: ``dp * cp``."""
        return self.dp * self.cp

    def size_of(self, axes: tuple[str, ...]) -> int:
        """Return the number of ranks of a slice along ``axes``."""
        return math.prod(getattr(self, axis) for axis in axes)

    def place(self, rank: int = 0) -> Place:
        return place_of(self.grid, rank)

    def expert_place(self, rank: int = 0) -> dict[str, int]:
        """Return a rank's coordinates among those that share a stage's experts; none where these lie as the rest."""
        if not self.has_expert_grid:
            return {}
        place = place_of(self.expert_grid, rank)
        return {axis: place[axis] for axis in ("edp", "ep", "etp")}

    def in_world(self, world_size: int) -> ParallelSizes:
        """Return the same layout of the model in a world of that many ranks: ``dp`` is the number of whole copies."""
        copy = self.pp * self.cp * self.tp
        # A search asks this tens of thousands of times: `dataclasses.replace` is slower.
        return ParallelSizes(
            tp=self.tp, pp=self.pp, cp=self.cp, dp=world_size // max(copy, 1), ep=self.ep, etp=self.etp
        )

    def problems(self, world_size: int, num_experts: int = 0) -> list[str]:
        """Return what keeps the grid from having exactly ``world_size`` ranks, one line or none.

        Of the expert-parallel sizes that would work those are named that divide ``num_experts``.
        """
        if self.world_size == world_size:
            return self._expert_problems(num_experts)
        copy = dataclasses.replace(self, dp=1).world_size
        return [
            f"world size {world_size} is not divisible by tensor({self.tp}) x pipeline({self.pp}) x "
            f"context({self.cp}) = {copy}; "
            "change --tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size "
            f"or the number of processes (multiples of {copy} work)"
        ]

    def _expert_problems(self, num_experts: int) -> list[str]:
        stage, experts = self.dp * self.cp * self.tp, self.ep * self.expert_tp
        if stage % max(experts, 1) == 0:
            return []
        sizes = [
            n for n in range(1, stage // self.expert_tp + 1) if stage % (n * self.expert_tp) == num_experts % n == 0
        ]
        works = f"expert-parallel sizes that work: {choices(sizes)}"
        if not sizes:
            sizes = [n for n in range(1, stage + 1) if stage % n == 0]
            works = f"expert-tensor-parallel sizes that work: {choices(sizes)}"
        return [
            f"the {stage} ranks of a pipeline stage, data({self.dp}) x context({self.cp}) x tensor({self.tp}), are not "
            f"divisible by expert({self.ep}) x expert-tensor({self.expert_tp}) = {experts}; change "
            f"--expert-model-parallel-size or --expert-tensor-parallel-size ({works})"
        ]

    def model_fields(self) -> dict[str, Any]:
        """Return the fields of a model's configuration that shard one copy of it."""
        dense = {name: getattr(self, axis) for axis, name in SIZE_NAMES.items() if name in MODEL_SIZE_NAMES}
        return dense | {name: getattr(self, axis) for axis, name in EXPERT_SIZE_NAMES.items()}

    def record(self) -> dict[str, int]:
        """Return what a checkpoint records of the layout that wrote it."""
        sizes = {name: getattr(self, axis) for axis, name in SIZE_NAMES.items()} | {"world_size": self.world_size}
        if self.has_expert_grid:
            sizes |= dict(zip(EXPERT_SIZE_NAMES.values(), (self.ep, self.expert_tp)))
        return sizes

    def describe(self) -> str:
        """Return every size in words, on one line."""
        words = {axis: name.removesuffix("_size").replace("_", "-") for axis, name in SIZE_NAMES.items()}
        text = ", ".join(f"{word} size: {getattr(self, axis)}" for axis, word in words.items())
        if self.has_expert_grid:
            text += f", expert-model-parallel size: {self.ep}, expert-tensor-parallel size: {self.expert_tp}"
        return text


ONE_RANK = ParallelSizes()
"""The grid of a model that is not sharded."""

GRID_AXES: tuple[str, ...] = ("pp", "dp", "cp", "tp")
"""The axes in grid order."""

SIZE_NAMES: Mapping[str, str] = {
    "dp": "data_parallel_size",
    "cp": "context_parallel_size",
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
}
"""What each axis's size is called in configurations and checkpoints."""

EXPERT_SIZE_NAMES: Mapping[str, str] = {"ep": "expert_model_parallel_size", "etp": "expert_tensor_parallel_size"}
"""What the sizes of the experts' own factorization are called."""

MODEL_SIZE_NAMES: tuple[str, ...] = tuple(name for axis, name in SIZE_NAMES.items() if axis != "dp")
"""The sizes that a model's configuration has; the data-parallel size follows from the world."""
