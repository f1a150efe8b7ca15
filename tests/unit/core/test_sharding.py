"""Boxes and shards cover a tensor exactly once, whatever the cut."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.sharding import (
    Box,
    ParamSpec,
    Shard,
    attach_spec,
    even_shards,
    flat_range_boxes,
    full_shards,
    spec_of,
    stacked_shards,
    tie_over_pipeline,
)

lengths = st.integers(1, 6)


@st.composite
def two_boxes(draw: st.DrawFn) -> tuple[Box, Box]:
    num_dims = draw(st.integers(1, 3))

    def box() -> Box:
        offset = tuple(draw(st.integers(0, 7)) for _ in range(num_dims))
        return Box(offset, tuple(draw(lengths) for _ in range(num_dims)))

    return box(), box()


@given(two_boxes())
def test_intersection_is_where_both_boxes_are(boxes: tuple[Box, Box]) -> None:
    first, second = boxes
    counts = np.zeros((14,) * len(first.offset), dtype=int)
    for box in boxes:
        counts[box.slices] += 1
    common = first.intersect(second)
    assert common == second.intersect(first)
    if common is None:
        assert counts.max() == 1
        return
    assert (counts[common.slices] == 2).all()
    assert (counts == 2).sum() == common.num_elements


@given(two_boxes())
def test_relative_box_names_the_same_elements(boxes: tuple[Box, Box]) -> None:
    first, second = boxes
    common = first.intersect(second)
    if common is None:
        return
    whole = np.arange(14 ** len(first.offset)).reshape((14,) * len(first.offset))
    inner = whole[first.slices][common.relative_to(first.offset).slices]
    assert np.array_equal(inner, whole[common.slices])


def cut_and_join(whole: np.ndarray, shards: list[tuple[Shard, ...]], local_shape: tuple[int, ...]) -> np.ndarray:
    """Fill every shard from the whole, then a new whole from the shards, each element exactly once."""
    joined = np.full_like(whole, -1)
    for own in shards:
        local = np.full(local_shape, -2)
        for shard in own:
            assert (local[shard.local_box.slices] == -2).all(), "shards overlap in the local tensor"
            local[shard.local_box.slices] = whole[shard.global_box.slices]
        for shard in own:
            assert (joined[shard.global_box.slices] == -1).all(), "shards overlap"
            joined[shard.global_box.slices] = local[shard.local_box.slices]
    return joined


@given(st.integers(1, 4), lengths, lengths, st.integers(0, 1))
def test_even_shards_partition_a_tensor(count: int, per_shard: int, other: int, dim: int) -> None:
    shape, local_shape = [other, other], [other, other]
    shape[dim], local_shape[dim] = count * per_shard, per_shard
    whole = np.arange(np.prod(shape)).reshape(shape)
    shards = [even_shards(shape, dim, index, count) for index in range(count)]
    assert np.array_equal(cut_and_join(whole, shards, tuple(local_shape)), whole)
    for index, own in enumerate(shards):
        parts = np.split(whole, count, axis=dim)
        assert np.array_equal(whole[own[0].global_box.slices], parts[index])


@given(st.integers(1, 4), st.integers(1, 30), st.integers(1, 9))
def test_padded_shards_hold_every_real_row_once(count: int, rows: int, multiple: int) -> None:
    padded = -(-rows // (multiple * count)) * multiple * count
    shards = [even_shards((rows, 3), 0, index, count, padded) for index in range(count)]
    whole = np.arange(rows * 3).reshape(rows, 3)
    assert np.array_equal(cut_and_join(whole, shards, (padded // count, 3)), whole)
    for index, own in enumerate(shards):
        real_rows = sum(shard.global_box.shape[0] for shard in own)
        assert real_rows == min(max(rows - index * (padded // count), 0), padded // count)


@given(st.integers(1, 4), st.integers(1, 3), lengths, st.integers(0, 1))
def test_stacked_shards_cut_every_part(count: int, parts: int, per_shard: int, dim: int) -> None:
    shape, local_shape = [5, 5], [5, 5]
    shape[dim], local_shape[dim] = count * parts * per_shard, parts * per_shard
    whole = np.arange(np.prod(shape)).reshape(shape)
    shards = [stacked_shards(shape, dim, index, count, parts) for index in range(count)]
    assert np.array_equal(cut_and_join(whole, shards, tuple(local_shape)), whole)
    for index, own in enumerate(shards):
        of_parts = [np.split(part, count, axis=dim)[index] for part in np.split(whole, parts, axis=dim)]
        held = [whole[shard.global_box.slices] for shard in own]
        assert all(np.array_equal(a, b) for a, b in zip(held, of_parts, strict=True))


def test_gated_weight_of_two_ranks() -> None:
    """``[gate; up]`` of 2 x 6 rows: rank 1 holds rows 3-5 of the gate over rows 3-5 of the up projection."""
    shards = stacked_shards((12, 7), 0, 1, 2, 2)
    assert [shard.global_box for shard in shards] == [Box((3, 0), (3, 7)), Box((9, 0), (3, 7))]
    assert [shard.local_offset for shard in shards] == [(0, 0), (3, 0)]


def test_vocabulary_rank_without_a_real_row_holds_nothing() -> None:
    assert even_shards((33, 5), 0, 3, 4, 64) == ()
    (last,) = even_shards((33, 5), 0, 2, 4, 64)
    assert last.global_box == Box((32, 0), (1, 5))


def test_spec_travels_with_the_parameter() -> None:
    parameter = torch.nn.Parameter(torch.zeros(4, 3))
    spec = ParamSpec("weight", (4, 3), full_shards((4, 3)))
    attach_spec(parameter, spec.with_prefix("decoder.layers.7."))
    assert spec_of(parameter).name == "decoder.layers.7.weight"
    assert spec.name == "weight"


def test_parameter_without_a_spec_is_an_error() -> None:
    with pytest.raises(AttributeError):
        spec_of(torch.nn.Parameter(torch.zeros(2)))


def test_only_the_first_replica_is_the_owner() -> None:
    owners = [ParamSpec("w", (4,), full_shards((4,)), replica_index=i, num_replicas=3).is_owner for i in range(3)]
    assert owners == [True, False, False]


shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)


@given(shapes, st.data())
def test_a_flat_range_is_few_boxes_that_follow_each_other(shape: tuple[int, ...], data: st.DataObject) -> None:
    whole = np.arange(np.prod(shape)).reshape(shape)
    start = data.draw(st.integers(0, whole.size))
    end = data.draw(st.integers(start, whole.size))
    boxes = flat_range_boxes(shape, start, end)
    assert len(boxes) <= 2 * len(shape) - 1
    values = [whole[box.slices].reshape(-1) for box in boxes]
    assert np.array_equal(np.concatenate([np.empty(0, int), *values]), np.arange(start, end))
    assert all(box.num_elements for box in boxes)


def test_as_many_boxes_as_a_flat_range_can_need() -> None:
    assert flat_range_boxes((3, 4, 5), 13, 53) == [
        Box((0, 2, 3), (1, 1, 2)),
        Box((0, 3, 0), (1, 1, 5)),
        Box((1, 0, 0), (1, 4, 5)),
        Box((2, 0, 0), (1, 2, 5)),
        Box((2, 2, 0), (1, 1, 3)),
    ]


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.data())
def test_shards_of_local_tensors_hold_every_element_of_the_global_one_once(
    count: int, rows: int, parts: int, columns: int, data: st.DataObject
) -> None:
    """Tensor-parallel shards of a stacked weight, each cut into flat ranges, are boxes that make up the whole."""
    whole = np.arange(count * rows * parts * columns).reshape(-1, columns)
    found = np.zeros(whole.shape, int)
    for index in range(count):
        spec = ParamSpec("w", whole.shape, stacked_shards(whole.shape, 0, index, count, parts))
        local = np.zeros((rows * parts, columns), int)
        for shard in spec.shards:
            local[shard.local_box.slices] = whole[shard.global_box.slices]
        cuts = sorted(data.draw(st.lists(st.integers(0, local.size), max_size=3)))
        for start, end in zip([0, *cuts], [*cuts, local.size]):
            position = start
            for box in flat_range_boxes(local.shape, start, end):
                values = local.reshape(-1)[position : position + box.num_elements].reshape(box.shape)
                position += box.num_elements
                for shard in spec.within(box).shards:
                    assert np.array_equal(whole[shard.global_box.slices], values[shard.local_box.slices])
                    found[shard.global_box.slices] += 1
    assert (found == 1).all()


def test_a_box_of_padding_holds_nothing() -> None:
    spec = ParamSpec("w", (33, 5), even_shards((33, 5), 0, 2, 4, 64))
    assert spec.within(Box((1, 0), (3, 5))).shards == ()
    (shard,) = spec.within(Box((0, 2), (4, 3))).shards
    assert shard == Shard(Box((32, 2), (1, 3)), (0, 0))


def test_copies_at_the_ends_of_the_pipeline_share_a_name_and_one_owner() -> None:
    held = ParamSpec("output_layer.weight", (8, 3), even_shards((8, 3), 0, 1, 2), init_std=0.5)
    name = "embedding.word_embeddings.weight"
    first, last = (tie_over_pipeline(held, name=name, is_first_stage=is_first) for is_first in (True, False))
    assert first.name == last.name == name
    assert (first.is_owner, last.is_owner) == (True, False)
    assert first.is_tied_over_pipeline
    assert last.is_tied_over_pipeline
    assert not held.is_tied_over_pipeline
    assert (first.shards, first.init_std) == (held.shards, 0.5)
