"""Sizes of the grid's axes, and where ranks stand in it."""

from __future__ import annotations

import pytest
import torch

from megatron.core.model_parallel_config import (
    ELEMENT_BYTES,
    ONE_RANK,
    ModelParallelConfig,
    ParallelSizes,
    place_of,
    slice_ranks,
)

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
    assert ModelParallelConfig(**fields).parallel_sizes.in_world(210) == SIZES
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
    one = ModelParallelConfig(cp_comm_type=("a2a+p2p",), **levels)
    several = ModelParallelConfig(cp_comm_type=("p2p", "a2a+p2p", "a2a"), **levels)
    assert [one.cp_exchange(layer) for layer in (0, 2)] == ["a2a+p2p"] * 2
    assert [several.cp_exchange(layer) for layer in range(3)] == ["p2p", "a2a+p2p", "a2a"]
    assert (one.cp_inner_size, several.cp_inner_size) == (2, 2)
    assert ModelParallelConfig(cp_comm_type=("p2p",), **levels).cp_inner_size is None
    assert ModelParallelConfig(cp_comm_type=("a2a+p2p",)).cp_inner_size is None
