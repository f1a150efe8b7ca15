"""Plans of writing, compared with plain counting of elements."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.planner import (
    SavePlanner,
    TensorDescription,
    check_writes,
    plan_writes,
    whole_tensor,
)
from megatron.core.errors import CheckpointError
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.sharding import Box, full_pieces, split_box, subtract, uncovered
from tests.unit.core.dist_checkpointing.toy import random_box

DTYPES = (("c", "float32"), ("b", "float64"), ("a", "uint8"), ("d", "float32"))


def describe(name: str, shape: tuple[int, ...], *boxes: Box, owner: bool = True) -> TensorDescription:
    return TensorDescription(name, shape, "float32", boxes, owner)


@pytest.mark.parametrize("shape", [(7,), (5, 6), (3, 4, 5), ()])
def test_subtract_leaves_each_remaining_element_once(shape: tuple[int, ...]) -> None:
    generator = random.Random(17)
    for _ in range(60):
        box, other = random_box(generator, shape), random_box(generator, shape)
        count = np.zeros(shape, dtype=int)
        for part in subtract(box, other):
            count[part.slices] += 1
        expected = np.zeros(shape, dtype=int)
        expected[box.slices] = 1
        expected[other.slices] = 0
        np.testing.assert_array_equal(count, expected)
        assert len(subtract(box, other)) <= max(1, 2 * len(shape))


def test_uncovered_is_empty_only_when_everything_is_held() -> None:
    whole = Box((0, 0), (4, 6))
    left, right = Box((0, 0), (4, 2)), Box((0, 2), (4, 4))
    assert uncovered(whole, [left, right]) == []
    assert uncovered(whole, [left]) == [right]
    assert uncovered(Box((0, 0), (0, 6)), []) == []


@pytest.mark.parametrize(("max_bytes", "rows"), [(4 * 5 * 7, [7]), (4 * 5 * 3, [3, 3, 1]), (1, [1] * 7)])
def test_boxes_are_split_along_the_first_dim(max_bytes: int, rows: list[int]) -> None:
    parts = split_box(Box((2, 3), (7, 5)), 4, max_bytes)
    assert [part.shape for part in parts] == [(count, 5) for count in rows]
    starts = [2, *(2 + total for total in itertools.accumulate(rows))]
    assert [part.offset for part in parts] == [(start, 3) for start in starts[:-1]]


def test_replicas_share_the_writing_evenly() -> None:
    ranks = [
        [describe(f"t{i}", (size, 3), *(p.global_box for p in full_pieces((size, 3)))) for i, size in sizes]
        for sizes in [list(enumerate((8, 5, 4, 3, 2, 2)))] * 3
    ]
    writes = plan_writes(ranks, range(3))
    check_writes(writes)
    written = [sum(box.num_elements for tensor in own for box in tensor.boxes) for own in writes]
    assert sum(written) == 24 * 3
    assert max(written) - min(written) <= 2 * 3


def test_copies_that_are_not_owners_write_nothing() -> None:
    whole = Box((0,), (9,))
    first, second = plan_writes([[describe("a", (9,), whole, owner=False)], [describe("a", (9,), whole)]], (4, 5))
    assert [tensor.boxes for tensor in first] == [()]
    assert [tensor.boxes for tensor in second] == [(whole,)]


def test_saving_with_a_gap_is_refused_by_name() -> None:
    held = [describe("a", (4, 2), Box((0, 0), (3, 2)))]
    with pytest.raises(CheckpointError, match=r"no rank holds a\[3:4,0:2\]"):
        check_writes(plan_writes([held], (0,)))


def test_parts_that_overlap_are_refused_by_name() -> None:
    held = [[describe("a", (4, 2), Box((0, 0), (4, 2)))], [describe("a", (4, 2), Box((0, 0), (1, 2)))]]
    with pytest.raises(CheckpointError, match=r"no replicas of each other own the same part of a$"):
        check_writes(held)


def test_ranks_that_disagree_are_named() -> None:
    held = [[describe("a", (4,), Box((0,), (4,)))], [describe("a", (5,), Box((0,), (5,)))]]
    with pytest.raises(CheckpointError, match=r"disagree on a: float32 \[4\] and, on rank 6, float32 \[5\]"):
        plan_writes(held, (2, 6))
    with pytest.raises(CheckpointError, match=r"disagree on a: float32 \[4\] and, on rank 1, float32 \[5\]"):
        check_writes(held)


def test_a_tensor_without_elements_is_planned() -> None:
    ((tensor,),) = plan_writes([[describe("a", (0, 3), Box((0, 0), (0, 3)))]], (0,))
    assert tensor.boxes == ()
    check_writes([[tensor]])


def test_wide_types_come_first_in_a_file() -> None:
    held = [replace(describe(name, (3,), Box((0,), (3,))), dtype=dtype) for name, dtype in DTYPES]
    ((*own,),) = plan_writes([held], (0,))
    assert [tensor.name for tensor in own] == ["b", "c", "d", "a"]


def test_experts_are_planned_with_the_rest_in_one_order() -> None:
    held = {name: whole_tensor(name, torch.zeros(2, 3)) for name in ("a", "b", "c", "d")}
    tensors = [replace(tensor, is_expert=name in "ac") for name, tensor in held.items()]
    plan = SavePlanner(describe_parallel_state(0, 1)).plan(tensors)
    assert [(tensor.name, tensor.is_expert) for tensor in plan.held] == [
        ("a", True),
        ("b", False),
        ("c", True),
        ("d", False),
    ]
    assert [tensor.name for tensor in plan.own] == ["a", "b", "c", "d"]
    assert plan.ranks == (plan.own,)


def test_a_plan_is_kept_until_a_description_changes() -> None:
    planner = SavePlanner(describe_parallel_state(0, 1))
    first = planner.plan([whole_tensor("a", torch.zeros(2))])
    assert planner.plan([whole_tensor("a", torch.ones(2))]) is first
    changed = planner.plan([whole_tensor("a", torch.zeros(3))])
    assert [tensor.global_shape for tensor in changed.own] == [(3,)]


@pytest.mark.parametrize(("rows", "num_boxes"), [(16 * 1024, 1), (16 * 1024 + 1, 2), (32 * 1024 + 1, 3)])
def test_no_piece_has_more_than_64_mib(rows: int, num_boxes: int) -> None:
    whole = describe("a", (rows, 1024), Box((0, 0), (rows, 1024)))
    ((tensor,),) = plan_writes([[whole]], (0,))
    assert len(tensor.boxes) == num_boxes
    assert max(box.num_elements * 4 for box in tensor.boxes) == 64 * 2**20
