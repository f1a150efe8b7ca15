"""The grid of ranks and this process's groups in it, as one value that is passed to whoever needs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from megatron.core.errors import ConfigurationError
from megatron.core.process_group import Group, Observer

GRID_AXES: tuple[str, ...] = ("pp", "dp", "cp", "tp")
"""Mesh axes from slowest to fastest varying: neighbouring ranks share a tensor-parallel group."""

_GROUP_AXES: dict[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "model_parallel": ("pp", "tp"),
    "world": GRID_AXES,
}


@dataclass(frozen=True, eq=False)
class ParallelState:
    """Hold one rank's groups: its slices of the grid of all ranks along every set of axes that training needs.

    ``dp_cp`` is where gradients are reduced, ``model_parallel`` (pp × tp) is where norms are summed. ``embedding`` is
    the first and the last pipeline stage, which may both hold the word embedding; a stage between is alone in its own.
    """

    rank: int
    world_size: int
    tp: Group
    cp: Group
    dp: Group
    pp: Group
    dp_cp: Group
    model_parallel: Group
    embedding: Group
    world: Group

    @property
    def is_first_stage(self) -> bool:
        """Return whether this rank holds the first pipeline stage."""
        return self.pp.is_first

    @property
    def is_last_stage(self) -> bool:
        """Return whether this rank holds the last pipeline stage."""
        return self.pp.is_last


def group_ranks(sizes: dict[str, int], axes: tuple[str, ...], rank: int) -> tuple[int, ...]:
    """Return the global ranks that differ from ``rank`` only along ``axes``, in grid order.

    ``sizes`` gives the length of every axis of ``GRID_AXES``. The cost grows with the group, not with the world.
    """
    strides, stride = {}, 1
    for axis in reversed(GRID_AXES):
        strides[axis] = stride
        stride *= sizes[axis]
    base = rank - sum((rank // strides[axis]) % sizes[axis] * strides[axis] for axis in axes)
    ranks = [base]
    for axis in GRID_AXES:
        if axis in axes:
            ranks = [r + i * strides[axis] for r in ranks for i in range(sizes[axis])]
    return tuple(ranks)


def describe_parallel_state(
    rank: int,
    world_size: int,
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    observer: Observer | None = None,
) -> ParallelState:
    """Return the groups of any rank of a world, without processes or communicators.

    ``observer`` is told of every communication over any of them.

    Raises:
        ConfigurationError: the world does not factor into the given sizes.
    """
    sizes = _grid_sizes(world_size, tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size)
    return _build(rank, world_size, sizes, lambda ranks: None, observer)


def create_parallel_state(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    context_parallel_size: int = 1,
    timeout: timedelta | None = None,
    observer: Observer | None = None,
) -> ParallelState:
    """Create this process's communicators; ``torch.distributed`` must be initialised unless the world is one process.

    One communicator is made for each distinct set of ranks, none for a set of one, and the set of all ranks uses the
    default group. Only the members of a group take part in making it. ``observer`` is told of every communication.

    Raises:
        ConfigurationError: the world does not factor into the given sizes.
    """
    if not dist.is_initialized():
        return describe_parallel_state(
            0, 1, tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size, observer
        )
    world_size = dist.get_world_size()
    sizes = _grid_sizes(world_size, tensor_model_parallel_size, pipeline_model_parallel_size, context_parallel_size)
    handles: dict[tuple[int, ...], dist.ProcessGroup | None] = {tuple(range(world_size)): dist.group.WORLD}

    def communicator(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        if len(ranks) == 1:
            return None
        if ranks not in handles:
            handles[ranks] = dist.new_group(ranks=list(ranks), timeout=timeout, use_local_synchronization=True)
        return handles[ranks]

    state = _build(dist.get_rank(), world_size, sizes, communicator, observer)
    if state.pp.size > 2 and state.embedding.size == 1:
        # torch names a group by how many its members have made before, and waits for ever where they disagree: stages
        # that have no part in the embedding group make one too, or no group of the whole pipeline could follow.
        dist.new_group(ranks=[state.rank], timeout=timeout, use_local_synchronization=True)
    return state


def _pipeline_ends(pp: Group) -> tuple[int, ...]:
    """Return the ranks of the first and the last stage where this rank is one of them, else this rank alone."""
    if pp.is_first or pp.is_last:
        return tuple(dict.fromkeys((pp.ranks[0], pp.ranks[-1])))
    return (pp.ranks[pp.rank],)


def _grid_sizes(world_size: int, tp: int, pp: int, cp: int) -> dict[str, int]:
    model = tp * pp * cp
    if world_size % model:
        raise ConfigurationError(
            f"world size {world_size} is not divisible by tensor({tp}) x pipeline({pp}) x context({cp}) = {model}; "
            "change --tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size "
            "or the number of processes"
        )
    return {"pp": pp, "dp": world_size // model, "cp": cp, "tp": tp}


def _build(
    rank: int,
    world_size: int,
    sizes: dict[str, int],
    communicator: Callable[[tuple[int, ...]], dist.ProcessGroup | None],
    observer: Observer | None,
) -> ParallelState:
    groups: dict[str, Group] = {}

    def add(name: str, axes: tuple[str, ...], ranks: tuple[int, ...]) -> None:
        groups[name] = Group(axes, ranks, ranks.index(rank), communicator(ranks), observer)

    for name, axes in _GROUP_AXES.items():
        add(name, axes, group_ranks(sizes, axes, rank))
    add("embedding", ("embedding",), _pipeline_ends(groups["pp"]))
    return ParallelState(rank=rank, world_size=world_size, **groups)
