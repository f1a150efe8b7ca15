"""Sizes of the grid's axes, and where ranks stand in it."""

from __future__ import annotations

import pytest

from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.parallel_sizes import ONE_RANK, ParallelSizes, place_of, slice_ranks

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
