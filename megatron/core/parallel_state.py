"""The grid of ranks and this process's groups in it, as one value that is passed to whoever needs it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

from megatron.core.collectives import all_gather_objects, gather_objects
from megatron.core.errors import ConfigurationError
from megatron.core.flight_recorder import FlightRecorder
from megatron.core.model_parallel_config import GRID_AXES, ONE_RANK, Grid, ParallelSizes, Place, slice_ranks
from megatron.core.process_group import Group, Observer, single_rank_group
from megatron.core.sharding import ParamSpec

Item = TypeVar("Item", bound=Hashable)

GROUP_AXES: Mapping[str, tuple[str, ...]] = {
    "tp": ("tp",),
    "cp": ("cp",),
    "dp": ("dp",),
    "pp": ("pp",),
    "dp_cp": ("dp", "cp"),
    "model_parallel": ("pp", "tp"),
    "world": GRID_AXES,
}
"""Every group that training needs, as the axes of the grid that it spans."""

EXPERT_GROUP_AXES: Mapping[str, tuple[str, ...]] = {"expert_model": ("ep", "etp"), "expert_dp": ("edp",)}
"""The groups of experts, as the axes of their own factorization of the ranks that they span."""


@dataclass(frozen=True, eq=False)
class ParallelState:
    """Hold one rank's place in the grid of all ranks and its groups: slices along every set of axes of ``GROUP_AXES``.

    ``dp_cp`` is where gradients are reduced, ``model_parallel`` (pp × tp) is where norms are summed. ``embedding`` is
    the first and the last pipeline stage, which may both hold the word embedding; a stage between is alone in its own.
    ``expert_model`` are the ranks that hold one copy of a stage's experts, of each expert its shards side by side, and
    ``expert_dp`` those that hold the same experts: ``tp`` and ``dp_cp`` where experts are spread as the rest is.
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
        """Return the ranks that hold the same values of a parameter, over which its gradient is reduced."""
        return self.expert_dp if spec.is_expert else self.dp_cp


Communicator = Callable[[tuple[int, ...]], "dist.ProcessGroup | None"]
"""Returns what a set of ranks communicates with; None where it does not."""


class Communicators:
    """Make one communicator for each distinct set of ranks, on its members alone, whichever grid it is a slice of.

    A set of one rank has none, and all ranks use the default group.
    """

    def __init__(self, timeout: timedelta | None = None) -> None:
        self._timeout = timeout
        self._made: dict[tuple[int, ...], dist.ProcessGroup | None] = {
            tuple(range(dist.get_world_size())): dist.group.WORLD
        }

    def __call__(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return the communicator of ``ranks``; all of them must ask for the same sets in the same order."""
        if len(ranks) == 1:
            return None
        if ranks not in self._made:
            self._made[ranks] = self.make(ranks)
        return self._made[ranks]

    def make(self, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
        """Return a new communicator of ``ranks``, be there one already or not."""
        made: dist.ProcessGroup | None
        made = dist.new_group(ranks=list(ranks), timeout=self._timeout, use_local_synchronization=True)
        return made


def twin_group(group: Group) -> Group:
    """Return the same ranks with a communicator of their own, whose calls cannot meet those over the group."""
    return group if group.size == 1 else replace(group, handle=Communicators().make(group.ranks))


def no_communicator(ranks: tuple[int, ...]) -> None:
    """Leave a group without a communicator: it describes ranks that need not exist."""


def make_groups(
    rank: int,
    grid: Grid,
    group_axes: Mapping[str, tuple[str, ...]],
    communicator: Communicator,
    observer: Observer | None = None,
    recorder: FlightRecorder | None = None,
) -> dict[str, Group]:
    """Return the slices of a grid that a rank lies in, one for each set of axes.

    The grid is any factorization of the ranks. ``observer`` is told of every communication over any of the groups, and
    ``recorder`` keeps them.
    """
    slices = {name: slice_ranks(grid, axes, rank) for name, axes in group_axes.items()}
    return {
        name: record_flight(Group(group_axes[name], ranks, ranks.index(rank), communicator(ranks), observer), recorder)
        for name, ranks in slices.items()
    }


def record_flight(group: Group, recorder: FlightRecorder | None) -> Group:
    """Return a group whose communications are recorded, where there is a recorder and anybody to talk to."""
    if recorder is None or group.size == 1:
        return group
    return replace(group, flight=recorder.channel("world" if group.axes == GRID_AXES else group.name, group.ranks))


def cut_in_levels(group: Group, inner_size: int, communicator: Communicator) -> Group:
    """Return a group with its levels: ``inner_size`` neighbors each, and those in the same place among theirs."""
    number, place = divmod(group.rank, inner_size)
    inner = group.ranks[number * inner_size : (number + 1) * inner_size]
    outer = group.ranks[place::inner_size]
    recorder = None if group.flight is None else group.flight.recorder
    names = tuple((f"{group.name}_{level}",) for level in ("inner", "outer"))
    return replace(
        group,
        levels=(
            record_flight(Group(names[0], inner, place, communicator(inner), group.observer), recorder),
            record_flight(Group(names[1], outer, number, communicator(outer), group.observer), recorder),
        ),
    )


def describe_parallel_state(
    rank: int, world_size: int, sizes: ParallelSizes = ONE_RANK, observer: Observer | None = None
) -> ParallelState:
    """Return the groups of any rank of a world, without processes or communicators.

    ``sizes`` shard one copy of the model; the world holds as many copies as it has room for. ``observer`` is
    told of every communication over any of the groups.

    Raises:
        ConfigurationError: the world is not a whole number of copies.
    """
    return _build(rank, world_size, sizes, no_communicator, observer, None, None)


def create_parallel_state(
    sizes: ParallelSizes = ONE_RANK,
    timeout: timedelta | None = None,
    observer: Observer | None = None,
    cp_inner_size: int | None = None,
    recorder: FlightRecorder | None = None,
    num_optimizer_instances: int = 1,
) -> ParallelState:
    """Create this process's communicators; ``torch.distributed`` must be initialized unless the world is one process.

    ``sizes`` shard one copy of the model; the world holds as many copies as it has room for. One communicator
    is made for each distinct set of ranks, none for a set of one, and the set of all ranks uses the default group. Only
    the members of a group take part in making it. ``observer`` is told of every communication, and ``recorder`` keeps
    them. With ``cp_inner_size`` the context-parallel group is cut in levels, and with ``num_optimizer_instances`` those
    of ranks with the same weights: the inner ones share what is sharded, and the outer ones hold copies of it.

    Raises:
        ConfigurationError: the world is not a whole number of copies.
    """
    if not dist.is_initialized():
        return describe_parallel_state(0, 1, sizes, observer)
    communicators = Communicators(timeout)
    state = _build(dist.get_rank(), dist.get_world_size(), sizes, communicators, observer, cp_inner_size, recorder)
    if num_optimizer_instances > 1:
        state = _cut_in_instances(state, num_optimizer_instances, communicators)
    if state.pp.size > 2 and state.embedding.size == 1:
        # torch names a group by how many its members have made before, and waits for ever where they disagree: stages
        # that have no part in the embedding group make one too, or no group of the whole pipeline could follow.
        communicators.make((state.rank,))
    return state


def _cut_in_instances(state: ParallelState, number: int, communicator: Communicator) -> ParallelState:
    """Return the state with the groups of ranks with the same weights cut in levels."""
    dense = cut_in_levels(state.dp_cp, state.dp_cp.size // number, communicator)
    if not state.sizes.has_expert_grid:
        return replace(state, dp_cp=dense, expert_dp=dense)
    experts = cut_in_levels(state.expert_dp, state.expert_dp.size // number, communicator)
    return replace(state, dp_cp=dense, expert_dp=experts)


def _pipeline_ends(pp: Group) -> tuple[int, ...]:
    """Return the ranks of the first and the last stage where this rank is one of them, else this rank alone."""
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
) -> ParallelState:
    sizes = sizes.in_world(world_size)
    if problems := sizes.problems(world_size):
        raise ConfigurationError(problems)
    groups = make_groups(rank, sizes.grid, GROUP_AXES, communicator, observer, recorder)
    if cp_inner_size is not None:
        groups["cp"] = cut_in_levels(groups["cp"], cp_inner_size, communicator)
    if sizes.has_expert_grid:
        groups |= make_groups(rank, sizes.expert_grid, EXPERT_GROUP_AXES, communicator, observer, recorder)
    else:
        groups |= {"expert_model": groups["tp"], "expert_dp": groups["dp_cp"]}
    ends = _pipeline_ends(groups["pp"])
    embedding = record_flight(Group(("embedding",), ends, ends.index(rank), communicator(ends), observer), recorder)
    return ParallelState(rank=rank, sizes=sizes, place=sizes.place(rank), embedding=embedding, **groups)


def gather_from_world(value: Any, state: ParallelState) -> list[Any]:
    """Return every rank's picklable value in the order of the ranks on the first rank, and nothing on the others.

    Each model-parallel place gathers first, so that no group is as large as the world.
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
    """Return every rank's picklable items in the order of the ranks, on all ranks.

    Replicas of a model-parallel place gather first. An item that several of them have is then sent once.
    """
    by_place = all_gather_objects((state.rank, list(items)), state.dp_cp)
    shared: dict[Item, Item] = {}
    # A pickle holds an object once, and equal ones as often as they are.
    compact = [(rank, [shared.setdefault(item, item) for item in of_rank]) for rank, of_rank in by_place]
    of_ranks = [found for row in all_gather_objects(compact, state.model_parallel) for found in row]
    return [of_rank for _, of_rank in sorted(of_ranks, key=lambda found: found[0])]


@dataclass(frozen=True, eq=False)
class ExpertGroups:
    """Hold the groups that a layer of experts communicates over.

    ``model`` are the ranks that hold one copy of all experts: ``tensor_size`` neighbors cut the same experts among
    them. ``tp`` and ``cp`` hold parts of the same micro-batch, ``dp`` other micro-batches.
    """

    model: Group
    tensor_size: int
    tp: Group
    cp: Group
    dp: Group

    @property
    def size(self) -> int:
        """Return over how many ranks, or groups of ranks that cut experts, the experts are spread."""
        return self.model.size // self.tensor_size

    @property
    def rank(self) -> int:
        return self.model.rank // self.tensor_size

    @property
    def tensor_rank(self) -> int:
        return self.model.rank % self.tensor_size

    @classmethod
    def of(cls, state: ParallelState) -> ExpertGroups:
        """Return the groups of a rank of a training."""
        return cls(state.expert_model, state.sizes.expert_tp, state.tp, state.cp, state.dp)

    @classmethod
    def like_dense(cls, tp: Group, cp: Group | None) -> ExpertGroups:
        """Return the groups of a model whose experts are all on every rank, cut as dense layers are."""
        return cls(tp, tp.size, tp, cp or single_rank_group(("cp",)), single_rank_group(("dp",)))
