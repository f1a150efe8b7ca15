"""Plans of writing and reading: every wanted element once, and cells whose checksums ranks can compare."""

from __future__ import annotations

import itertools
import os
import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron.core.dist_checkpointing.index import StoredShard, StoredTensor
from megatron.core.dist_checkpointing.planner import (
    SavePlanner,
    ShardRead,
    TensorDescription,
    check_writes,
    plan_reads,
    plan_writes,
    refine,
    shard_key,
    whole_tensor,
)
from megatron.core.dist_checkpointing.shard_file import ShardEntry, write_shard
from megatron.core.dist_checkpointing.shard_reader import ShardReader, check_shards, contiguous_runs
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.sharding import Box, Shard, full_shards, split_box, subtract, uncovered
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
        [describe(f"t{i}", (size, 3), *(p.global_box for p in full_shards((size, 3)))) for i, size in sizes]
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
    with pytest.raises(CheckpointError, match=r"no rank has a\[3:4,0:2\]"):
        check_writes(plan_writes([held], (0,)))


def test_parts_that_overlap_are_refused_by_name() -> None:
    held = [[describe("a", (4, 2), Box((0, 0), (4, 2)))], [describe("a", (4, 2), Box((0, 0), (1, 2)))]]
    with pytest.raises(CheckpointError, match=r"not replicas of each other own the same part of a$"):
        check_writes(held)


def test_ranks_that_disagree_are_named() -> None:
    held = [[describe("a", (4,), Box((0,), (4,)))], [describe("a", (5,), Box((0,), (5,)))]]
    with pytest.raises(CheckpointError, match=r"disagree on a: it is float32 \[4\], but float32 \[5\] on rank 6"):
        plan_writes(held, (2, 6))
    with pytest.raises(CheckpointError, match=r"disagree on a: it is float32 \[4\], but float32 \[5\] on rank 1"):
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


def stored(name: str, shape: tuple[int, ...], *boxes: Box) -> StoredTensor:
    shards, start = [], 100
    for number, box in enumerate(boxes):
        shards.append(StoredShard(box, f"file{number % 2}", f"{name}{number}", start, box.num_elements * 4, ""))
        start += box.num_elements * 4
    return StoredTensor(name, shape, "float32", tuple(shards))


def grid(rows: list[int], columns: list[int]) -> list[Box]:
    return [
        Box((r0, c0), (r1 - r0, c1 - c0))
        for r0, r1 in itertools.pairwise(rows)
        for c0, c1 in itertools.pairwise(columns)
    ]


def count(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    counts = np.zeros(shape, int)
    for box in boxes:
        counts[box.slices] += 1
    return counts


def global_cells(read: ShardRead) -> list[Box]:
    origin = [-offset for offset in read.shard.box.offset]
    return [cell.box.relative_to(origin) for cell in read.cells]


@pytest.mark.parametrize("shape", [(9,), (5, 6), (3, 4, 5), ()])
def test_cells_are_disjoint_and_make_up_every_box(shape: tuple[int, ...]) -> None:
    generator = random.Random(len(shape))
    for _ in range(40):
        boxes = [random_box(generator, shape) for _ in range(generator.randint(1, 4))]
        cells = refine(boxes)
        counts = count(shape, cells)
        assert (counts == (count(shape, boxes) > 0)).all()
        for box, cell in itertools.product(boxes, cells):
            assert box.intersect(cell) in (None, cell)


def test_reads_bring_every_wanted_element_once_and_no_other() -> None:
    generator = random.Random(5)
    shape = (6, 7)
    values = np.arange(42).reshape(shape)
    tensor = stored("a", shape, *grid([0, 2, 5, 6], [0, 3, 7]))
    for _ in range(30):
        box = random_box(generator, shape)
        local = np.full((9, 9), -1)
        reads = plan_reads([("a", [Shard(box, (1, 2))])], {"a": tensor}, verify=False)
        for read in reads:
            part = values[read.shard.box.slices]
            for cell in read.cells:
                for copy in cell.copies:
                    assert (local[copy.destination.slices] == -1).all()
                    local[copy.destination.slices] = part[cell.box.slices]
        np.testing.assert_array_equal(local[Box((1, 2), box.shape).slices], values[box.slices])
        assert (local != -1).sum() == box.num_elements
        read_boxes = [cell for read in reads for cell in global_cells(read)]
        np.testing.assert_array_equal(count(shape, read_boxes), count(shape, [box]))


def test_a_stored_piece_that_is_wanted_twice_is_read_once_and_in_file_order() -> None:
    tensor = stored("a", (8,), Box((0,), (4,)), Box((4,), (2,)), Box((6,), (2,)))
    wanted = [("a", [Shard(Box((2,), (6,)), (0,))]), ("a", [Shard(Box((0,), (5,)), (0,))])]
    reads = plan_reads(wanted, {"a": tensor})
    assert [(read.shard.file, read.shard.start) for read in reads] == [
        ("file0", 100),
        ("file0", 124),
        ("file1", 116),
    ]
    assert [(cell.box.offset, [copy.target for copy in cell.copies]) for cell in reads[0].cells] == [
        ((0,), [1]),
        ((2,), [0, 1]),
    ]


def test_a_missing_box_is_named_with_its_tensor() -> None:
    tensor = stored("a", (8, 3), Box((0, 0), (4, 3)), Box((6, 0), (2, 3)))
    with pytest.raises(CheckpointError, match=r"lacks a\[4:6,0:3\]"):
        plan_reads([("a", full_shards((8, 3)))], {"a": tensor})
    with pytest.raises(CheckpointError, match="no tensor b"):
        plan_reads([("b", full_shards((8, 3)))], {"a": tensor})


def test_what_nobody_wants_of_a_piece_is_read_for_its_checksum_by_one_rank() -> None:
    tensor = stored("a", (6, 4), Box((0, 0), (3, 4)), Box((3, 0), (3, 4)))
    wanted = [Box((1, 0), (2, 2)), Box((1, 1), (2, 2))]
    ranks = [[TensorDescription("a", (6, 4), "float32", (box,))] for box in wanted]
    counts = np.zeros((6, 4), int)
    for rank, box in enumerate(wanted):
        reads = plan_reads([("a", [Shard(box, (0, 0))])], {"a": tensor}, ranks, rank)
        assert [read.shard.key for read in reads] == ["a0"]
        own = count((6, 4), [cell for read in reads for cell in global_cells(read)])
        assert own.max() == 1
        if rank > 0:
            assert own.sum() == box.num_elements
        counts += own
    assert (counts[:3] > 0).all()
    assert counts.sum() == 12 + 2  # two elements are wanted by both


@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (3, 4, 5), (3, 1, 5)])
def test_runs_are_the_bytes_of_the_box_in_order(shape: tuple[int, ...]) -> None:
    generator = random.Random(1)
    places = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    for _ in range(30):
        box = random_box(generator, shape)
        num_bytes, starts = contiguous_runs(shape, box, 4)
        found = [start // 4 + element for start in starts for element in range(num_bytes // 4)]
        assert found == places[box.slices].reshape(-1).tolist()


def write_pieces(folder: Path, values: torch.Tensor, boxes: list[Box]) -> StoredTensor:
    shape = tuple(values.shape)
    keys = [shard_key("a", shape, box) for box in boxes]
    entries = [ShardEntry(key, values[box.slices]) for key, box in zip(keys, boxes)]
    written = write_shard(folder / "s", entries)
    assert written.file is not None
    sizes = [box.num_elements * 4 for box in boxes]
    starts = itertools.accumulate(sizes, initial=written.file.header_bytes)
    places = zip(boxes, keys, starts, sizes, written.checksums)
    shards = tuple(StoredShard(box, "s", *place) for box, *place in places)
    return StoredTensor("a", shape, "float32", shards)


def load_on_all_ranks(folder: Path, tensor: StoredTensor, wanted: list[list[Box]]) -> list[list[torch.Tensor]]:
    """Load what each of several ranks wants, one after the other, and compare checksums as they would."""
    ranks = [[TensorDescription("a", tensor.global_shape, "float32", tuple(boxes))] for boxes in wanted]
    loaded, checksums = [], []
    for rank, boxes in enumerate(wanted):
        targets = [torch.full(box.shape, -1.0) for box in boxes]
        shards = [("a", [Shard(box, (0,) * len(box.shape))]) for box in boxes]
        with ShardReader(folder) as reader:
            for read in plan_reads(shards, {"a": tensor}, ranks, rank):
                reader.read(read, targets)
        loaded.append(targets)
        checksums.append(reader.cell_checksums)
    check_shards(folder, {"a": tensor}, checksums)
    return loaded


@pytest.fixture
def bytes_read(monkeypatch: pytest.MonkeyPatch) -> Counter[int]:
    """Count how often each byte of a file is read from the system."""
    counts: Counter[int] = Counter()
    original = os.preadv

    def preadv(descriptor: int, buffers: list[memoryview], start: int) -> int:
        received = original(descriptor, buffers, start)
        counts.update(range(start, start + received))
        return received

    monkeypatch.setattr(os, "preadv", preadv)
    return counts


LAYOUTS = {
    "whole": [grid([0, 11], [0, 9])],
    "rows": [[box] for box in grid([0, 3, 7, 11], [0, 9])],
    "columns": [[box] for box in grid([0, 11], [0, 2, 9])],
    "flat-ranges": [
        [Box((0, 0), (2, 9)), Box((2, 0), (1, 5))],
        [Box((2, 5), (1, 4)), Box((3, 0), (7, 9)), Box((10, 0), (1, 1))],
        [Box((10, 1), (1, 8))],
    ],
    "copies": [grid([0, 11], [0, 4]), grid([0, 11], [4, 9]), grid([0, 11], [0, 4]), grid([0, 11], [4, 9])],
    "overlapping": [grid([0, 8], [0, 9]), grid([4, 11], [0, 6]), grid([4, 11], [3, 9])],
    "whole-and-columns": [grid([0, 11], [0, 9]), grid([0, 11], [0, 4])],
}


@pytest.mark.parametrize("before", LAYOUTS)
@pytest.mark.parametrize("after", LAYOUTS)
def test_each_rank_reads_its_own_bytes_once_and_all_checksums_are_compared(
    tmp_path: Path, before: str, after: str, bytes_read: Counter[int]
) -> None:
    values = torch.randn(11, 9)
    boxes = refine(box for rank in LAYOUTS[before] for box in rank)
    tensor = write_pieces(tmp_path, values, boxes)
    loaded = load_on_all_ranks(tmp_path, tensor, LAYOUTS[after])
    for wanted, targets in zip(LAYOUTS[after], loaded):
        for box, target in zip(wanted, targets):
            assert torch.equal(target, values[box.slices])
    wanted_boxes = [box for rank in LAYOUTS[after] for box in rank]
    expected = count((11, 9), wanted_boxes)
    counted = np.zeros((11, 9), int)
    for shard in tensor.shards:
        start = range(shard.start, shard.start + shard.num_bytes, 4)
        counted[shard.box.slices] = np.array([bytes_read[byte] for byte in start]).reshape(shard.box.shape)
    np.testing.assert_array_equal(counted, expected)
    assert sum(bytes_read.values()) == expected.sum() * 4


@pytest.mark.parametrize("after", LAYOUTS)
def test_a_flipped_byte_is_named_whoever_reads_it(tmp_path: Path, after: str) -> None:
    tensor = write_pieces(tmp_path, torch.randn(11, 9), grid([0, 5, 11], [0, 4, 9]))
    path = tmp_path / "s"
    whole = path.read_bytes()
    for shard in tensor.shards:
        data = bytearray(whole)
        data[shard.start + shard.num_bytes // 2] ^= 2
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpointError) as caught:
            load_on_all_ranks(tmp_path, tensor, LAYOUTS[after])
        assert str(caught.value) == f"{path}: the bytes of {shard.key} do not match their checksum"


def test_copies_that_were_read_differently_are_noticed(tmp_path: Path) -> None:
    values = torch.randn(4, 6)
    tensor = write_pieces(tmp_path, values, grid([0, 4], [0, 6]))
    box = Box((0, 0), (4, 3))
    ranks = [[TensorDescription("a", (4, 6), "float32", (part,))] for part in (box, box, Box((0, 3), (4, 3)))]
    checksums = []
    for rank, (description,) in enumerate(ranks):
        if rank == 1:
            data = bytearray((tmp_path / "s").read_bytes())
            data[tensor.shards[0].start] ^= 1
            (tmp_path / "s").write_bytes(data)
        with ShardReader(tmp_path) as reader:
            for read in plan_reads([("a", [Shard(description.boxes[0], (0, 0))])], {"a": tensor}, ranks, rank):
                reader.read(read, [torch.empty(4, 3)])
        checksums.append(reader.cell_checksums)
    with pytest.raises(DamagedCheckpointError, match="do not match"):
        check_shards(tmp_path, {"a": tensor}, checksums)


@pytest.mark.parametrize(
    ("box", "run_bytes", "starts"),
    [
        (Box((0, 0), (4, 6)), 96, [0]),
        (Box((1, 0), (2, 6)), 48, [24]),
        (Box((1, 2), (2, 3)), 12, [32, 56]),
        (Box((0, 5), (4, 1)), 4, [20, 44, 68, 92]),
    ],
)
def test_whole_rows_are_one_run(box: Box, run_bytes: int, starts: list[int]) -> None:
    found = contiguous_runs((4, 6), box, 4)
    assert (found[0], list(found[1])) == (run_bytes, starts)
