"""Groups of the grid of ranks, described without processes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from types import FrameType
from typing import Any

import numpy as np
import pytest

from megatron.core import parallel_state
from megatron.core.errors import ConfigurationError
from megatron.core.model_parallel_config import ParallelSizes, place_of
from megatron.core.parallel_state import (
    GROUP_AXES,
    ParallelState,
    create_parallel_state,
    describe_parallel_state,
    make_groups,
    no_communicator,
)
from megatron.core.process_group import Group, single_rank_group


def rows_of_axes(sizes: Mapping[str, int], axes: tuple[str, ...]) -> np.ndarray:
    """Return every group over ``axes`` as one row: the grid with those axes moved last."""
    grid = np.arange(np.prod(list(sizes.values()))).reshape(list(sizes.values()))
    places = [list(sizes).index(axis) for axis in axes]
    moved = np.moveaxis(grid, places, range(grid.ndim - len(places), grid.ndim))
    return moved.reshape(-1, int(np.prod([sizes[axis] for axis in axes])))


@pytest.mark.parametrize(
    ("pp", "dp", "cp", "tp"),
    [(1, 1, 1, 1), (2, 2, 2, 2), (4, 1, 1, 4), (2, 4, 1, 2), (1, 16, 1, 1), (1, 1, 8, 2), (3, 2, 4, 5), (2, 3, 5, 1)],
)
def test_groups_are_slices_of_the_grid(pp: int, dp: int, cp: int, tp: int) -> None:
    sizes = ParallelSizes(tp=tp, pp=pp, cp=cp, dp=dp)
    states = [describe_parallel_state(rank, pp * dp * cp * tp, sizes) for rank in range(pp * dp * cp * tp)]
    for name, axes in GROUP_AXES.items():
        rows = rows_of_axes(sizes.grid, axes)
        for rank, state in enumerate(states):
            group: Group = getattr(state, name)
            (row,) = rows[(rows == rank).any(axis=1)]
            assert group.ranks == tuple(row), f"{name} of rank {rank}"
            assert group.ranks[group.rank] == rank
            assert group.axes == axes
            assert group.handle is None
            assert (group.size, group.name) == (len(row), "_".join(axes))
            assert group.size == sizes.size_of(axes)


EXPERT_GROUPS = {"ep": ("ep",), "edp": ("edp",), "etp": ("etp",), "expert_model": ("pp", "ep", "etp")}
"""What mixture-of-experts layers would need of a second factorization of the same ranks."""


@pytest.mark.parametrize(("pp", "edp", "ep", "etp"), [(2, 2, 3, 1), (1, 3, 2, 2), (3, 1, 4, 1)])
def test_a_second_factorization_of_the_same_ranks_is_another_grid(pp: int, edp: int, ep: int, etp: int) -> None:
    sizes = ParallelSizes(tp=2, pp=pp).in_world(12)
    experts = {"pp": pp, "edp": edp, "ep": ep, "etp": etp}
    for rank in range(12):
        dense = make_groups(rank, sizes.grid, GROUP_AXES, no_communicator)
        groups = make_groups(rank, experts, EXPERT_GROUPS | {"pp": ("pp",)}, no_communicator)
        assert groups["pp"].ranks == dense["pp"].ranks
        for name, axes in EXPERT_GROUPS.items():
            rows = rows_of_axes(experts, axes)
            (row,) = rows[(rows == rank).any(axis=1)]
            assert groups[name].ranks == tuple(row)
        place = {**place_of(experts, rank), **sizes.place(rank)}
        assert all(place[name] == group.rank for name, group in (groups | dense).items() if len(group.axes) == 1)


def test_neighbors_share_a_tensor_parallel_group_and_stages_are_far_apart() -> None:
    state = describe_parallel_state(6, 16, ParallelSizes(tp=2, pp=4))
    assert state.tp.ranks == (6, 7)
    assert state.dp.ranks == (4, 6)
    assert state.pp.ranks == (2, 6, 10, 14)
    assert not state.pp.is_first
    assert not state.pp.is_last
    assert describe_parallel_state(0, 16, ParallelSizes(tp=2, pp=4)).pp.is_first
    assert describe_parallel_state(15, 16, ParallelSizes(tp=2, pp=4)).pp.is_last
    assert describe_parallel_state(0, 2, ParallelSizes(tp=2)).pp.is_first
    assert describe_parallel_state(0, 2, ParallelSizes(tp=2)).pp.is_last


def counted_calls(function: Any, *args: Any) -> tuple[Any, int]:
    """Return the result and how many Python and C functions the call made."""
    calls: Counter[str] = Counter()

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        calls[event] += 1

    sys.setprofile(profile)
    try:
        result = function(*args)
    finally:
        sys.setprofile(None)
    return result, calls["call"] + calls["c_call"]


def test_any_rank_of_16384_is_described_without_looking_at_the_others() -> None:
    """The number of calls does not grow with the world, so a rank costs the same anywhere."""
    counts = set()
    for rank in (0, 5_000, 16_383):
        state, count = counted_calls(describe_parallel_state, rank, 16_384, ParallelSizes(tp=8, pp=16, cp=2))
        assert isinstance(state, ParallelState)
        assert (state.tp.size, state.pp.size, state.cp.size, state.dp.size) == (8, 16, 2, 64)
        assert state.world.ranks == tuple(range(16_384))
        assert state.tp.ranks[state.tp.rank] == rank
        counts.add(count)
    _, small = counted_calls(describe_parallel_state, 0, 512, ParallelSizes(tp=8, pp=16, cp=2))
    assert max(counts) <= 2 * small


@pytest.mark.parametrize(("world_size", "cp", "model"), [(6, 1, 4), (2, 1, 4), (4, 2, 8)])
def test_world_that_does_not_factor_is_refused_with_what_to_change(world_size: int, cp: int, model: int) -> None:
    with pytest.raises(ConfigurationError) as caught:
        describe_parallel_state(0, world_size, ParallelSizes(tp=2, pp=2, cp=cp))
    assert str(caught.value) == (
        f"world size {world_size} is not divisible by tensor(2) x pipeline(2) x context({cp}) = {model}; change "
        "--tensor-model-parallel-size, --pipeline-model-parallel-size, --context-parallel-size "
        f"or the number of processes (multiples of {model} work)"
    )
    assert "\n" not in str(caught.value)


def test_one_process_needs_no_process_group() -> None:
    state = create_parallel_state()
    assert (state.rank, state.world_size) == (0, 1)
    assert all(getattr(state, name).handle is None for name in GROUP_AXES)
    with pytest.raises(ConfigurationError, match="world size 1 is not divisible"):
        create_parallel_state(ParallelSizes(tp=2))


def test_single_rank_group_is_first_and_last() -> None:
    group = single_rank_group(("dp", "cp"), rank=7)
    assert (group.size, group.ranks, group.rank, group.name) == (1, (7,), 0, "dp_cp")
    assert group.is_first
    assert group.is_last


def test_the_ends_of_the_pipeline_form_the_embedding_group() -> None:
    for rank in range(12):
        state = describe_parallel_state(rank, 12, ParallelSizes(tp=2, pp=3))
        stage, place = divmod(rank, 4)
        assert state.embedding.ranks == ((place, place + 8) if stage != 1 else (rank,))
        assert state.embedding.ranks[state.embedding.rank] == rank
    assert describe_parallel_state(1, 4, ParallelSizes(tp=2)).embedding.ranks == (1,)
    assert describe_parallel_state(1, 2, ParallelSizes(pp=2)).embedding.ranks == (0, 1)


@pytest.fixture
def communicators(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Pretend to be rank 2 of a world of eight, and list the ranks of each communicator that is made."""
    made: list[tuple[int, ...]] = []
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    monkeypatch.setattr(parallel_state.Communicators, "make", lambda self, ranks: made.append(ranks))
    return made


@pytest.mark.parametrize(("pp", "makes_its_own"), [(1, False), (2, False), (4, True)])
def test_stages_between_the_ends_make_a_communicator_instead_of_the_embeddings(
    pp: int, makes_its_own: bool, communicators: list[tuple[int, ...]]
) -> None:
    create_parallel_state(ParallelSizes(pp=pp))
    assert ((2,) in communicators) is makes_its_own


@pytest.mark.usefixtures("communicators")
def test_copies_of_shards_are_apart_for_experts_that_are_spread_otherwise() -> None:
    dense = create_parallel_state(ParallelSizes(tp=2), num_optimizer_instances=2)
    assert dense.expert_dp is dense.dp_cp
    assert dense.dp_cp.levels is not None
    assert [group.ranks for group in dense.dp_cp.levels] == [(0, 2), (2, 6)]
    experts = create_parallel_state(ParallelSizes(ep=2), num_optimizer_instances=2)
    assert experts.dp_cp.levels is not None
    assert [group.ranks for group in experts.dp_cp.levels] == [(0, 1, 2, 3), (2, 6)]
    assert experts.expert_dp.levels is not None
    assert [group.ranks for group in experts.expert_dp.levels] == [(0, 2), (2, 6)]
    assert create_parallel_state(ParallelSizes(tp=2)).dp_cp.levels is None


@pytest.mark.usefixtures("communicators")
def test_context_parallel_ranks_are_cut_in_levels_where_that_is_asked_for() -> None:
    levels = create_parallel_state(ParallelSizes(cp=4), cp_inner_size=2).cp.levels
    assert levels is not None
    assert [(group.ranks, group.rank, group.name) for group in levels] == [
        ((2, 3), 0, "cp_inner"),
        ((0, 2), 1, "cp_outer"),
    ]
