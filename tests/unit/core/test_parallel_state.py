"""The grid of ranks: sizes of its axes, places in it, and its groups, described without processes."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from datetime import timedelta
from types import FrameType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core import parallel_state
from megatron.core.errors import ConfigurationError
from megatron.core.parallel_config import (
    ELEMENT_BYTES,
    ONE_RANK,
    ParallelConfig,
    ParallelSizes,
    place_of,
    slice_ranks,
)
from megatron.core.parallel_state import (
    GROUP_AXES,
    ParallelState,
    create_parallel_state,
    describe_parallel_state,
    make_groups,
    no_communicator,
)
from megatron.core.pipeline_parallel import p2p_communication
from megatron.core.process_group import Group, NcclOptions, single_rank_group

SIZES = ParallelSizes(tp=2, pp=3, cp=5, dp=7)


def test_products_of_the_axes() -> None:
    assert (SIZES.world_size, SIZES.num_replicas, SIZES.size_of(("pp", "tp"))) == (210, 35, 6)
    assert list(SIZES.grid.items()) == [("pp", 3), ("dp", 7), ("cp", 5), ("tp", 2)]
    assert set(ONE_RANK.grid.values()) == {1}


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (ParallelSizes(dp=3, cp=2, tp=2), 3),
        (ParallelSizes(dp=2, ep=2), 1),
        (ParallelSizes(dp=4, ep=2), 2),
        (ParallelSizes(dp=2, tp=2, ep=2, etp=1), 2),
        (ParallelSizes(dp=2, tp=2, ep=4, etp=1), 1),
        (ParallelSizes(dp=2, tp=1, etp=2), 1),
        # Three replicas of experts, and the one in the middle is of both copies.
        (ParallelSizes(pp=2, dp=2, cp=3, ep=2), 1),
    ],
)
def test_copies_that_share_experts_are_not_apart(sizes: ParallelSizes, expected: int) -> None:
    assert sizes.num_copies_apart == expected
    # The same by following who shares a copy of the dense part, or experts.
    part = list(range(sizes.world_size // sizes.pp))
    for _ in part:
        for grid, axes in ((sizes.grid, ("cp", "tp")), (sizes.expert_grid, ("ep", "etp"))):
            part = [min(part[other] for other in slice_ranks(grid, axes, rank)) for rank in range(len(part))]
    assert len(set(part)) == expected


def test_places_count_the_ranks_with_the_last_axis_fastest() -> None:
    places = [tuple(SIZES.place(rank).values()) for rank in range(210)]
    assert places == [(pp, dp, cp, tp) for pp in range(3) for dp in range(7) for cp in range(5) for tp in range(2)]
    assert place_of({"a": 2, "b": 3}, 4) == {"a": 1, "b": 1}


def test_a_slice_ignores_the_order_of_its_axes() -> None:
    grid = {"pp": 2, "dp": 3, "cp": 1, "tp": 2}
    assert slice_ranks(grid, ("tp", "pp"), 3) == slice_ranks(grid, ("pp", "tp"), 3) == (2, 3, 8, 9)


@pytest.mark.parametrize(("world_size", "dp", "fits"), [(30, 1, True), (60, 2, True), (61, 2, False), (29, 0, False)])
def test_a_world_holds_as_many_copies_as_it_has_room_for(world_size: int, dp: int, fits: bool) -> None:
    sizes = SIZES.in_world(world_size)
    assert sizes == ParallelSizes(tp=2, pp=3, cp=5, dp=dp)
    assert sizes.in_world(world_size) == sizes
    assert (sizes.problems(world_size) == []) == fits


def test_names_of_the_sizes() -> None:
    fields = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 3, "context_parallel_size": 5}
    of_experts = {"expert_model_parallel_size": 1, "expert_tensor_parallel_size": None}
    assert SIZES.model_fields() == fields | of_experts
    assert ParallelConfig(**fields).parallel_sizes.in_world(210) == SIZES
    assert SIZES.record() == {**fields, "data_parallel_size": 7, "world_size": 210}
    model_sizes = "context-parallel size: 5, tensor-model-parallel size: 2, pipeline-model-parallel size: 3"
    assert SIZES.describe() == f"data-parallel size: 7, {model_sizes}"


@pytest.mark.parametrize(
    ("sizes", "has_grid", "replicas"),
    [
        (ParallelSizes(dp=4, tp=2), False, 4),
        (ParallelSizes(dp=4, tp=2, ep=2), True, 2),
        (ParallelSizes(dp=4, tp=2, etp=2), False, 4),
        (ParallelSizes(dp=4, tp=2, etp=1), True, 8),
        (ParallelSizes(dp=2, cp=2, tp=2, ep=2, etp=1), True, 4),
    ],
)
def test_experts_have_a_grid_of_their_own_where_they_are_spread_otherwise(
    sizes: ParallelSizes, has_grid: bool, replicas: int
) -> None:
    assert (sizes.has_expert_grid, sizes.num_expert_replicas) == (has_grid, replicas)
    recorded = {"expert_model_parallel_size": sizes.ep, "expert_tensor_parallel_size": sizes.expert_tp}
    assert {name: size for name, size in sizes.record().items() if "expert" in name} == (recorded if has_grid else {})
    ending = f"expert-model-parallel size: {sizes.ep}, expert-tensor-parallel size: {sizes.expert_tp}"
    assert sizes.describe().endswith(ending) == has_grid
    assert list(sizes.expert_place(1)) == (["edp", "ep", "etp"] if has_grid else [])
    assert sizes.problems(sizes.world_size) == []


@pytest.mark.parametrize(
    ("sizes", "num_experts", "works"),
    [
        (ParallelSizes(dp=4, ep=3), 8, "expert-parallel sizes that work: 1, 2, 4"),
        (ParallelSizes(dp=4, ep=3), 6, "expert-parallel sizes that work: 1, 2"),
        (ParallelSizes(dp=2, tp=3, ep=4), 8, "expert-parallel sizes that work: 1, 2"),
        (ParallelSizes(dp=6, ep=1, etp=4), 8, "expert-tensor-parallel sizes that work: 1, 2, 3, 6"),
    ],
)
def test_sizes_of_experts_that_would_work_are_named(sizes: ParallelSizes, num_experts: int, works: str) -> None:
    (problem,) = sizes.problems(sizes.world_size, num_experts)
    assert works + ")" in problem


def test_elements_have_torchs_sizes() -> None:
    assert {name: getattr(torch, name).itemsize for name in ELEMENT_BYTES} == ELEMENT_BYTES


def test_layers_exchange_keys_and_values_as_the_flags_say() -> None:
    levels = {"context_parallel_size": 4, "hierarchical_context_parallel_sizes": (2, 2)}
    one = ParallelConfig(cp_comm_type=("a2a+p2p",), **levels)
    several = ParallelConfig(cp_comm_type=("p2p", "a2a+p2p", "a2a"), **levels)
    assert [one.cp_exchange(layer) for layer in (0, 2)] == ["a2a+p2p"] * 2
    assert [several.cp_exchange(layer) for layer in range(3)] == ["p2p", "a2a+p2p", "a2a"]
    assert (one.cp_inner_size, several.cp_inner_size) == (2, 2)
    assert ParallelConfig(cp_comm_type=("p2p",), **levels).cp_inner_size is None
    assert ParallelConfig(cp_comm_type=("a2a+p2p",)).cp_inner_size is None


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
    monkeypatch.setattr(parallel_state.Communicators, "make", lambda self, ranks, options=None: made.append(ranks))
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


class NcclBackend:
    """Stand in for torch's class of NCCL communicators, which a CPU build of torch lacks."""

    class Options:
        def __init__(self, is_high_priority_stream: bool = False) -> None:
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = timedelta(minutes=10)
            self.config = SimpleNamespace(blocking=1, cga_cluster_size=-1, min_ctas=-1, max_ctas=-1)


OPTIONS = {"dp_cp": NcclOptions(min_ctas=2, max_ctas=8), "pp": NcclOptions(cga_cluster_size=2)}


@pytest.fixture
def new_groups(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], Any]]:
    """Pretend to be rank 2 of a world of eight with NCCL; list the ranks and the options of each group that is made."""
    made: list[tuple[list[int], Any]] = []

    def new_group(ranks: list[int], pg_options: Any = None, **others: Any) -> object:
        made.append((ranks, pg_options))
        return object()

    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 2)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 8)
    monkeypatch.setattr("torch.distributed.get_backend", lambda group=None: "nccl")
    monkeypatch.setattr("torch.distributed.new_group", new_group)
    monkeypatch.setattr("torch.distributed.ProcessGroupNCCL", NcclBackend, raising=False)
    return made


def test_a_communicator_has_the_options_of_its_group(new_groups: list[tuple[list[int], Any]]) -> None:
    timeout = timedelta(minutes=3)
    state = create_parallel_state(ParallelSizes(tp=2, pp=2), timeout, nccl_options=OPTIONS)
    given = {tuple(ranks): options for ranks, options in new_groups if options is not None}
    assert given.keys() == {state.dp_cp.ranks, state.pp.ranks}
    data, pipeline = given[state.dp_cp.ranks], given[state.pp.ranks]
    assert data.config == SimpleNamespace(blocking=1, cga_cluster_size=-1, min_ctas=2, max_ctas=8)
    assert pipeline.config == SimpleNamespace(blocking=1, cga_cluster_size=2, min_ctas=-1, max_ctas=-1)
    assert data.is_high_priority_stream
    assert data._timeout == timeout
    # The group dp has the same ranks and no options.
    assert state.dp.ranks == state.dp_cp.ranks
    assert state.dp.handle is not state.dp_cp.handle
    connect_links = p2p_communication._make_communicator(state.pp, timeout)
    assert connect_links is not None
    assert new_groups[-1][0] == list(state.pp.ranks)
    assert new_groups[-1][1].config.cga_cluster_size == 2


def test_options_of_all_ranks_need_a_communicator_beside_the_default_group(
    new_groups: list[tuple[list[int], Any]],
) -> None:
    state = create_parallel_state(ParallelSizes(), nccl_options=OPTIONS)
    assert [ranks for ranks, _ in new_groups] == [list(range(8))]
    assert state.dp_cp.handle is not state.dp.handle
    assert new_groups[0][1].config.max_ctas == 8
    sharded = create_parallel_state(ParallelSizes(), num_optimizer_instances=2, nccl_options=OPTIONS).dp_cp
    assert sharded.levels is not None
    assert [options.config.max_ctas for _, options in new_groups[1:]] == [8, 8, 8]


def test_other_backends_and_groups_without_options_have_none(
    monkeypatch: pytest.MonkeyPatch, new_groups: list[tuple[list[int], Any]]
) -> None:
    create_parallel_state(ParallelSizes(tp=2))
    monkeypatch.setattr("torch.distributed.get_backend", lambda group=None: "gloo")
    create_parallel_state(ParallelSizes(tp=2), nccl_options=OPTIONS)
    assert new_groups
    assert [options for _, options in new_groups] == [None] * len(new_groups)


@pytest.mark.usefixtures("new_groups")
def test_option_that_torch_lacks_is_named() -> None:
    with pytest.raises(ConfigurationError, match=r"^this torch cannot set net_name of an NCCL communicator; omit it"):
        create_parallel_state(ParallelSizes(tp=2), nccl_options={"tp": NcclOptions(net_name="IB")})


@pytest.mark.usefixtures("communicators")
def test_context_parallel_ranks_are_cut_in_levels_where_that_is_asked_for() -> None:
    levels = create_parallel_state(ParallelSizes(cp=4), cp_inner_size=2).cp.levels
    assert levels is not None
    assert [(group.ranks, group.rank, group.name) for group in levels] == [
        ((2, 3), 0, "cp_inner"),
        ((0, 2), 1, "cp_outer"),
    ]
