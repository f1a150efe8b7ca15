"""Places of parameters in flat buffers, and the memory that sharded gradients borrow."""

from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fully_sharded_data_parallel import BucketPool
from megatron.core.distributed.param_layout import (
    ParamRange,
    default_bucket_size,
    plan_layout,
    ranges_within,
)


def test_parameters_lie_last_used_first_at_aligned_starts() -> None:
    layout = plan_layout([10, 20, 5], param_alignment=8)
    assert layout.ranges == (ParamRange(2, 0, 5, 0), ParamRange(1, 0, 20, 8), ParamRange(0, 0, 10, 32))
    assert len(layout.buckets) == 1
    assert layout.num_elements == 48


def test_a_bucket_is_closed_by_the_parameter_that_fills_it() -> None:
    layout = plan_layout([7, 9, 16, 3, 4], bucket_size=12, param_alignment=4)
    assert [[each.index for each in bucket.ranges] for bucket in layout.buckets] == [[4, 3, 2], [1, 0]]
    assert [(bucket.start, bucket.end) for bucket in layout.buckets] == [(0, 24), (24, 44)]
    assert layout.buckets[1].ranges == (ParamRange(1, 0, 9, 24), ParamRange(0, 0, 7, 36))


def test_a_large_parameter_is_a_bucket_of_its_own() -> None:
    layout = plan_layout([3, 100, 2], bucket_size=50, param_alignment=1)
    assert [[each.index for each in bucket.ranges] for bucket in layout.buckets] == [[2, 1], [0]]


@pytest.mark.parametrize("num_shards", [1, 3, 8])
@pytest.mark.parametrize("bucket_size", [None, 1, 40, 10_000])
def test_ranges_are_disjoint_aligned_and_buckets_cut_into_aligned_shards(
    bucket_size: int | None, num_shards: int
) -> None:
    sizes = [1, 17, 64, 300, 2, 129, 5]
    layout = plan_layout(sizes, bucket_size, param_alignment=16, num_shards=num_shards)
    assert sorted(each.index for each in layout.ranges) == list(range(len(sizes)))
    position = 0
    for bucket in layout.buckets:
        assert bucket.start == position
        assert (bucket.end - bucket.start) % (16 * num_shards) == 0
        for each in bucket.ranges:
            assert each.position >= position
            assert each.position % 16 == 0
            assert each.num_elements == sizes[each.index]
            position = each.end_position
        assert position <= bucket.end
        position = bucket.end
    assert layout.num_elements == position


def test_no_parameters_need_no_buffer() -> None:
    assert plan_layout([]).num_elements == 0


def test_default_bucket_size_grows_with_many_ranks() -> None:
    assert default_bucket_size(8) == 40_000_000
    assert default_bucket_size(64) == 64_000_000


@pytest.mark.parametrize("alone", [0, 2, 4])
def test_a_parameter_that_stays_alone_has_the_same_shards_in_any_company(alone: int) -> None:
    sizes = [30, 41, 52, 63, 74]
    layout = plan_layout(sizes, bucket_size=10_000, param_alignment=8, num_shards=3, alone=[alone])
    (bucket,) = [b for b in layout.buckets if alone in [each.index for each in b.ranges]]
    (other,) = plan_layout([sizes[alone]], param_alignment=8, num_shards=3, alone=[0]).buckets
    assert [each.index for each in bucket.ranges] == [alone]
    for index in range(3):
        assert [edge - bucket.start for edge in bucket.shard(index, 3)] == list(other.shard(index, 3))
    assert sorted(each.index for each in layout.ranges) == list(range(5))
    assert [each.index for each in layout.ranges] == [4, 3, 2, 1, 0]


@pytest.mark.parametrize("num_shards", [1, 2, 5])
@pytest.mark.parametrize("bucket_size", [None, 90])
def test_shards_hold_every_element_of_every_parameter_once(bucket_size: int | None, num_shards: int) -> None:
    sizes = [1, 170, 64, 33]
    layout = plan_layout(sizes, bucket_size, param_alignment=8, num_shards=num_shards)
    found = [[0] * size for size in sizes]
    for bucket in layout.buckets:
        edges = []
        for index in range(num_shards):
            start, end = bucket.shard(index, num_shards)
            edges.append((start, end))
            assert start % 8 == 0
            for part in ranges_within(bucket.ranges, start, end):
                each = next(s for s in bucket.ranges if s.index == part.index)
                assert start + part.position == each.position + part.start
                for element in range(part.start, part.end):
                    found[part.index][element] += 1
        assert edges[0][0] == bucket.start
        assert edges[-1][1] == bucket.end
        assert len({end - start for start, end in edges}) == 1
    assert all(count == 1 for counts in found for count in counts)


def test_a_range_of_padding_holds_no_part() -> None:
    ranges = (ParamRange(1, 0, 10, 0), ParamRange(0, 0, 4, 16))
    assert ranges_within(ranges, 10, 16) == []
    assert ranges_within(ranges, 8, 18) == [ParamRange(1, 8, 10, 0), ParamRange(0, 0, 2, 8)]


def test_memory_that_came_back_is_lent_again() -> None:
    pool = BucketPool(7, torch.bfloat16, torch.device("cpu"))
    assert not pool.has_free
    first, second = pool.take(), pool.take()
    assert (first.numel(), first.dtype) == (7, torch.bfloat16)
    assert first.data_ptr() != second.data_ptr()
    pool.give(first)
    assert pool.has_free
    assert pool.take() is first
    assert not pool.has_free
    assert pool.num_allocated == 2
