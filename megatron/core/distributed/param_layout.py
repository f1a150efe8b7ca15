"""Layout of parameters in a flat buffer, and the split of the buffer into buckets and of each bucket into shards.

Gradients become ready from the last layer to the first, so a buffer filled in that order can be reduced bucket by
bucket while the backward pass still runs. Li et al. 2020, https://arxiv.org/abs/2006.15704.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig

PARAM_ALIGNMENT = 128
"""Alignment of each parameter's start, in elements; norms are summed in blocks of this size."""
MIN_POOL_SIZE = 2
"""Minimum number of full-size buckets of sharded gradients to allocate before waiting for a reduction in flight."""


@dataclass(frozen=True)
class ParamRange:
    """The elements ``[start, end)`` of the flattened parameter ``index``, and their position in a flat buffer.

    ``index`` counts the caller's list of parameters. ``position`` counts elements from the start of the buffer, or of
    the range of the buffer that was passed to `ranges_within`.
    """

    index: int
    start: int
    end: int
    position: int

    @property
    def num_elements(self) -> int:
        return self.end - self.start

    @property
    def end_position(self) -> int:
        return self.position + self.num_elements


@dataclass(frozen=True)
class BucketLayout:
    """Range ``[start, end)`` of the flat buffer that one collective reduces, including padding."""

    start: int
    end: int
    ranges: tuple[ParamRange, ...]

    @property
    def num_elements(self) -> int:
        """Return the length of the range, including padding."""
        return self.end - self.start

    def shard(self, index: int, count: int) -> tuple[int, int]:
        """Return the range of the flat buffer of shard ``index`` of ``count`` equal shards."""
        length = self.num_elements // count
        assert length * count == self.num_elements, "the layout was planned for another number of shards"
        return self.start + index * length, self.start + (index + 1) * length


@dataclass(frozen=True)
class ParamLayout:
    """Buckets of a flat buffer in the order in which their gradients become ready."""

    buckets: tuple[BucketLayout, ...]

    @property
    def num_elements(self) -> int:
        """Return the length of the buffer, including padding."""
        return self.buckets[-1].end if self.buckets else 0

    @property
    def ranges(self) -> tuple[ParamRange, ...]:
        return tuple(each for bucket in self.buckets for each in bucket.ranges)


def plan_layout(
    sizes: Sequence[int],
    bucket_size: int | None = None,
    param_alignment: int = PARAM_ALIGNMENT,
    num_shards: int = 1,
    alone: Collection[int] = (),
    units: Sequence[int] = (),
) -> ParamLayout:
    """Lay out parameters of ``sizes`` elements, given in order of use; the last one used is placed first.

    A bucket ends with the parameter that brings it to ``bucket_size`` elements; None makes a single bucket. Every
    parameter starts at a multiple of ``param_alignment``, and the length of every bucket is a multiple of it times
    ``num_shards``, so that a bucket can be split into aligned equal shards. Each parameter listed in ``alone`` gets its
    own bucket, so that its shards do not depend on the rank's other parameters. A bucket never mixes parameters of
    different ``units``, which gives a label for each parameter.
    """
    buckets: list[BucketLayout] = []
    ranges: list[ParamRange] = []
    bucket_start = position = 0

    def close_bucket() -> None:
        nonlocal bucket_start, position
        length = round_up(position - bucket_start, param_alignment * num_shards)
        buckets.append(BucketLayout(bucket_start, bucket_start + length, tuple(ranges)))
        bucket_start = position = bucket_start + length
        ranges.clear()

    for index in reversed(range(len(sizes))):
        begins_unit = bool(units) and bool(ranges) and units[index] != units[ranges[-1].index]
        if ranges and (index in alone or begins_unit):
            close_bucket()
        start = round_up(position, param_alignment)
        position = start + sizes[index]
        ranges.append(ParamRange(index, 0, sizes[index], start))
        is_full = bucket_size is not None and position - bucket_start >= bucket_size
        if is_full or index in alone:
            close_bucket()
    if ranges:
        close_bucket()
    return ParamLayout(tuple(buckets))


def plan_buckets(
    sizes: Sequence[int],
    tied: Collection[int],
    config: DistributedDataParallelConfig,
    num_replicas: int,
    units: Sequence[int] = (),
) -> ParamLayout:
    """Return the buckets and shards in which data parallelism reduces the gradients of parameters of one dtype.

    ``sizes`` are in order of use, and ``tied`` lists the parameters that another pipeline stage holds too.
    ``num_replicas`` is the number of ranks with the same weights. If weights are sharded, each of the ``units``, one
    label per parameter, has separate buckets without a size limit.
    """
    is_sharded = config.shards_over(num_replicas)
    shares_piecewise = is_sharded and (config.shards_gradients or config.overlap_param_gather)
    bucket_size = None
    by_unit = is_sharded and config.shards_weights and bool(units)
    if not by_unit and (config.overlap_grad_reduce or shares_piecewise):
        bucket_size = config.ddp_bucket_size or default_bucket_size(num_replicas)
    # Both stages that hold a copy must have the same elements of it in their shards.
    alone = tied if is_sharded else ()
    num_shards = config.num_shards(num_replicas)
    return plan_layout(sizes, bucket_size, num_shards=num_shards, alone=alone, units=units if by_unit else ())


def ranges_within(ranges: Sequence[ParamRange], start: int, end: int) -> list[ParamRange]:
    """Return the parts of parameters within the range ``[start, end)`` of the flat buffer, in buffer order.

    The positions of ``ranges`` are relative to the start of the buffer, those of the result to ``start``.
    """
    held = []
    for each in ranges:
        low, high = max(start, each.position), min(end, each.end_position)
        if low < high:
            first = each.start - each.position
            held.append(ParamRange(each.index, first + low, first + high, low - start))
    return held


def default_bucket_size(data_parallel_size: int) -> int:
    """Return the bucket size in elements that keeps collectives bandwidth-bound on many ranks."""
    return max(40_000_000, 1_000_000 * data_parallel_size)


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``value``."""
    return -(-value // multiple) * multiple
