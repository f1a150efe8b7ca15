"""The rank grid and this process's groups in it, as one value that is passed explicitly instead of global state.

The functions of megatron-core's module of this name (``initialize_model_parallel``, ``get_tensor_model_parallel_group``
and so on) are available here too; `megatron.core.process_state` defines them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from megatron.core.collectives import all_gather_objects, gather_objects
from megatron.core.errors import ConfigurationError
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.parallel_config import GRID_AXES, ONE_RANK, Grid, ParallelSizes, Place, slice_ranks
from megatron.core.process_group import Group, NcclOptions, Observer, single_rank_group
from megatron.core.sharding import ParamSpec

if TYPE_CHECKING:
    from megatron.core.process_state import *  # noqa: F403

Item = TypeVar("Item", bound=Hashable)


def __getattr__(name: str) -> Any:
    """Return a name of megatron-core's module from the module with the process-wide groups."""
    return getattr(importlib.import_module("megatron.core.process_state"), name)


GROUP_AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "model_parallel": ("pp", "tp"),
    "world": GRID_AXES,
}
"""Every group that training needs, and the grid axes that it spans."""

EXPERT_GROUP_AXES: Mapping[str, tuple[str, ...]] = {"expert_model": ("ep", "etp"), "expert_dp": ("edp",)}
"""The expert groups, and the axes of the expert grid that they span."""


@dataclass(frozen=True, eq=False)
class ParallelState:
    """A rank's coordinates in the grid, and its groups: slices along the sets of axes in ``GROUP_AXES``.

    Gradients are reduced over ``dp_cp``, and norms are summed over ``model_parallel`` (pp × tp). ``embedding`` is the
    first and the last pipeline stage, which may both hold the word embedding; for a stage in between it has one rank.
    ``expert_model`` are the ranks that hold one copy of a stage's experts, with the shards of each expert on
    neighboring ranks. ``expert_dp`` are the ranks that hold the same experts. They equal ``tp`` and ``dp_cp`` if
    experts use the same grid as the rest of the model.
    """

    rank: int
    sizes: ParallelSizes
    place: Place
    tp: Group
    cp: Group
    dp: Group
    pp: Group
    dp_cp: Group
    model_parallel: Group
    embedding: Group
    world: Group
    expert_model: Group
    expert_dp: Group

    @property
    def world_size(self) -> int:
        return self.sizes.world_size

    def replicas_of(self, spec: ParamSpec) -> Group:
        """Return the ranks that hold the same shard of a parameter, over which its gradient is reduced."""
        return self.expert_dp if spec.is_expert else self.dp_cp


Communicator = Callable[[tuple[int, ...], "NcclOptions | None"], "dist.ProcessGroup | None"]
"""Returns the communicator of a set of ranks with these options, or None if they do not communicate."""


class Communicators:
    """Cache of one communicator per distinct set of ranks, created by its members only and shared between grids.

    A set of one rank has none, and the set of all ranks uses the default group. Different options need different
    communicators.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._made: dict[tuple[tuple[int, ...], NcclOptions | None], dist.ProcessGroup | None] = {
            (tuple(range(dist.get_world_size())), None): dist.group.WORLD
        }

    def __call__(self, ranks: tuple[int, ...], options: NcclOptions | None = None) -> dist.ProcessGroup | None:
        """Return the communicator of ``ranks``; all members must request the same sets in the same order."""
        if len(ranks) == 1:
            return None
        key = (ranks, options)
        if key not in self._made:
            self._made[key] = self.make(ranks, options)
        return self._made[key]

    def make(self, ranks: tuple[int, ...], options: NcclOptions | None = None) -> dist.ProcessGroup | None:
        """Create a new communicator of ``ranks``, even if there is one already."""
        return make_communicator(ranks, self._timeout, options)


def make_communicator(
    ranks: tuple[int, ...], timeout: timedelta | None = None, options: NcclOptions | None = None
) -> dist.ProcessGroup | None:
    """Create a communicator of ``ranks``, which its members call together."""
    made: dist.ProcessGroup | None
    made = dist.new_group(
        ranks=list(ranks),
        timeout=timeout,
        pg_options=make_backend_options(options, timeout),
        use_local_synchronization=True,
    )
    return made


def make_backend_options(options: NcclOptions | None, timeout: timedelta | None) -> Any:
    """Return torch's options of a new group, or None for the defaults and for other backends than NCCL.

    Raises:
        ConfigurationError: this torch cannot set one of the options.
    """
    if options is None or dist.get_backend() != "nccl":
        return None
    made = dist.ProcessGroupNCCL.Options(is_high_priority_stream=options.is_high_priority_stream)
    if timeout is not None:
        made._timeout = timeout
    for name, value in options.config.items():
        if not hasattr(made.config, name):
            raise ConfigurationError(f"this torch cannot set {name} of an NCCL communicator; omit it in the file")
        setattr(made.config, name, value)
    return made


def twin_group(group: Group) -> Group:
    """Return a group of the same ranks with a separate communicator, whose calls cannot interleave with the group's."""
    return group if group.size == 1 else replace(group, handle=make_communicator(group.ranks, options=group.options))


def no_communicator(ranks: tuple[int, ...], options: NcclOptions | None) -> None:
    """Return no communicator, for groups that describe ranks without processes."""


def make_groups(
    rank: int,
    grid: Grid,
    group_axes: Mapping[str, tuple[str, ...]],
    communicator: Communicator,
    observer: Observer | None = None,
    recorder: FlightRecorder | None = None,
    options: Mapping[str, NcclOptions] | None = None,
) -> dict[str, Group]:
    """Return the slices of a grid that contain a rank, one for each set of axes.

    The grid is any factorization of the ranks. ``observer`` is called for every communication over any of the groups,
    and ``recorder`` records them. ``options`` are those of the communicators, by the name of the group.
    """
    groups = {}
    for name, axes in group_axes.items():
        ranks, own = slice_ranks(grid, axes, rank), (options or {}).get(name)
        group = Group(axes, ranks, ranks.index(rank), communicator(ranks, own), observer, options=own)
        groups[name] = record_flight(group, recorder)
    return groups


def record_flight(group: Group, recorder: FlightRecorder | None) -> Group:
    """Return the group with its communications recorded, if there is a recorder and the group has several ranks."""
    if recorder is None or group.size == 1:
        return group
    return replace(group, flight=recorder.channel("world" if group.axes == GRID_AXES else group.name, group.ranks))


def cut_in_levels(group: Group, inner_size: int, communicator: Communicator) -> Group:
    """Split a group into two levels: ``inner_size`` neighboring ranks, and the ranks with the same index in theirs."""
    number, place = divmod(group.rank, inner_size)
    inner = group.ranks[number * inner_size : (number + 1) * inner_size]
    outer = group.ranks[place::inner_size]
    recorder = None if group.flight is None else group.flight.recorder

    def level(name: str, ranks: tuple[int, ...], rank: int) -> Group:
        handle = communicator(ranks, group.options)
        made = Group((f"{group.name}_{name}",), ranks, rank, handle, group.observer, options=group.options)
        return record_flight(made, recorder)

    return replace(group, levels=(level("inner", inner, place), level("outer", outer, number)))


def describe_parallel_state(
    rank: int, world_size: int, sizes: ParallelSizes = ONE_RANK, observer: Observer | None = None
) -> ParallelState:
    """Return the groups of any rank of a world, without processes or communicators.

    ``sizes`` shard one copy of the model; the data-parallel size follows from the world size. ``observer`` is called
    for every communication over any of the groups.

    Raises:
        ConfigurationError: the world size is not a multiple of the size of one copy.
        ConfigurationError: the world is not a whole number of copies.
    """
    return _build(rank, world_size, sizes, no_communicator, observer, None, None, {})


def create_parallel_state(
    sizes: ParallelSizes = ONE_RANK,
    timeout: timedelta | None = None,
    observer: Observer | None = None,
    cp_inner_size: int | None = None,
    recorder: FlightRecorder | None = None,
    num_optimizer_instances: int = 1,
    nccl_options: Mapping[str, NcclOptions] | None = None,
) -> ParallelState:
    """Create this process's communicators; initialize ``torch.distributed`` first unless the world is one process.

    ``sizes`` shard one copy of the model; the data-parallel size follows from the world size. One communicator is
    created for each distinct set of several ranks, by its members only, and the set of all ranks uses the default
    group. ``observer`` is called for every communication, and ``recorder`` records them. With ``cp_inner_size`` the
    context-parallel group is split into two levels. With ``num_optimizer_instances`` the groups of ranks with the same
    weights are split: optimizer state is sharded over the inner ranks and replicated over the outer ranks.
    ``nccl_options`` are those of the communicators, by the name of the group.

    Raises:
        ConfigurationError: the world size is not a multiple of the size of one copy.
    """
    if not dist.is_initialized():
        return describe_parallel_state(0, 1, sizes, observer)
    communicators = Communicators(timeout)
    state = _build(
        *(dist.get_rank(), dist.get_world_size(), sizes, communicators, observer, cp_inner_size, recorder),
        nccl_options or {},
    )
    if num_optimizer_instances > 1:
        state = _cut_in_instances(state, num_optimizer_instances, communicators)
    if state.pp.size > 2 and state.embedding.size == 1:
        # torch names a group by the number of groups that its members created before, and hangs if they disagree. So
        # stages outside the embedding group create a group too; otherwise no group of the whole pipeline could be
        # created later.
        communicators.make((state.rank,))
    return state


def _cut_in_instances(state: ParallelState, number: int, communicator: Communicator) -> ParallelState:
    """Return the state with the groups of ranks with the same weights split into two levels."""
    dense = cut_in_levels(state.dp_cp, state.dp_cp.size // number, communicator)
    if not state.sizes.has_expert_grid:
        return replace(state, dp_cp=dense, expert_dp=dense)
    experts = cut_in_levels(state.expert_dp, state.expert_dp.size // number, communicator)
    return replace(state, dp_cp=dense, expert_dp=experts)


def _pipeline_ends(pp: Group) -> tuple[int, ...]:
    """Return the ranks of the first and the last stage if this rank is one of them, otherwise this rank alone."""
    if pp.is_first or pp.is_last:
        return tuple(dict.fromkeys((pp.ranks[0], pp.ranks[-1])))
    return (pp.ranks[pp.rank],)


def _build(
    rank: int,
    world_size: int,
    sizes: ParallelSizes,
    communicator: Communicator,
    observer: Observer | None,
    cp_inner_size: int | None,
    recorder: FlightRecorder | None,
    options: Mapping[str, NcclOptions],
) -> ParallelState:
    sizes = sizes.in_world(world_size)
    if problems := sizes.problems(world_size):
        raise ConfigurationError(problems)
    groups = make_groups(rank, sizes.grid, GROUP_AXES, communicator, observer, recorder, options)
    if cp_inner_size is not None:
        groups["cp"] = cut_in_levels(groups["cp"], cp_inner_size, communicator)
    if sizes.has_expert_grid:
        groups |= make_groups(rank, sizes.expert_grid, EXPERT_GROUP_AXES, communicator, observer, recorder, options)
    else:
        groups |= {"expert_model": groups["tp"], "expert_dp": groups["dp_cp"]}
    ends = _pipeline_ends(groups["pp"])
    own = options.get("embedding")
    embedding = Group(("embedding",), ends, ends.index(rank), communicator(ends, own), observer, options=own)
    embedding = record_flight(embedding, recorder)
    return ParallelState(rank=rank, sizes=sizes, place=sizes.place(rank), embedding=embedding, **groups)


def gather_from_world(value: Any, state: ParallelState) -> list[Any]:
    """Return every rank's picklable value in rank order on the first rank, and an empty list on the others.

    The ranks with equal weights gather first, so that no group is as large as the world.
    """
    by_place = gather_objects(value, state.dp_cp)
    if not state.dp_cp.is_first:
        return []
    rows = gather_objects(by_place, state.model_parallel)
    places = [
        (first + replica, value)
        for first, row in zip(state.model_parallel.ranks, rows)
        for replica, value in zip(state.dp_cp.ranks, row, strict=True)
    ]
    return [value for _, value in sorted(places, key=lambda place: place[0])]


def all_gather_from_world(items: Sequence[Item], state: ParallelState) -> list[list[Item]]:
    """Return every rank's picklable items in rank order, on all ranks.

    The ranks with equal weights gather first. An item that several of them have is then sent only once.
    """
    by_place = all_gather_objects((state.rank, list(items)), state.dp_cp)
    shared: dict[Item, Item] = {}
    # A pickle stores the same object once, but equal objects separately.
    compact = [(rank, [shared.setdefault(item, item) for item in of_rank]) for rank, of_rank in by_place]
    of_ranks = [found for row in all_gather_objects(compact, state.model_parallel) for found in row]
    return [of_rank for _, of_rank in sorted(of_ranks, key=lambda found: found[0])]


@dataclass(frozen=True, eq=False)
class ExpertGroups:
    """Groups for the communication of an expert layer.

    ``model`` are the ranks that hold one copy of all experts, of which ``tensor_size`` neighbors shard the same
    experts. ``tp`` and ``cp`` hold parts of the same micro-batch, ``dp`` other micro-batches.
    """

    model: Group
    tensor_size: int
    tp: Group
    cp: Group
    dp: Group

    @property
    def size(self) -> int:
        """Return the expert-parallel size: the number of ranks, or groups of ranks, with different experts."""
        return self.model.size // self.tensor_size

    @property
    def rank(self) -> int:
        return self.model.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        return self.model.rank % self.tensor_size

    @classmethod
    def of(cls, state: ParallelState) -> ExpertGroups:
        """Return the expert groups of a rank in training."""
        return cls(state.expert_model, state.sizes.expert_tp, state.tp, state.cp, state.dp)

    @classmethod
    def like_dense(cls, tp: Group, cp: Group | None) -> ExpertGroups:
        """Return the groups of a model that has all experts on every rank, sharded as its dense layers are."""
        return cls(tp, tp.size, tp, cp or single_rank_group(("cp",)), single_rank_group(("dp",)))
