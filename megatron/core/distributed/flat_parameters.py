"""Flat parameters: one buffer per dtype, all-gathered from shards, and the shard that each rank updates.

Weights that only FP8 matmuls use are all-gathered in FP8.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from megatron.core.collectives import all_gather_into, all_reduce
from megatron.core.distributed.param_layout import BucketLayout, ParamLayout, ranges_within
from megatron.core.flight_recorder import PendingWork
from megatron.core.ops import E4M3, WHOLE, Quantized, quantize, scale_of
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, flat_range_boxes, spec_of


def flatten(parameters: Sequence[torch.nn.Parameter], layout: ParamLayout) -> torch.Tensor:
    """Move parameters to a flat buffer, of which they become views, and return it.

    Shapes: ``-> [layout.num_elements]``; padding between parameters is zero.
    """
    first = parameters[0]
    data = torch.zeros(layout.num_elements, dtype=first.dtype, device=first.device)
    for each in layout.ranges:
        parameter = parameters[each.index]
        view = data[each.position : each.end_position].view(parameter.shape)
        view.copy_(parameter.detach())
        parameter.data = view
    return data


class FlatParameters:
    """Flat buffer of parameters, whose buckets are all-gathered from the data-parallel ranks' shards.

    The parameters become views of the buffer.

    Shapes: ``data: [layout.num_elements]``; padding between parameters is zero and stays so.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], layout: ParamLayout, group: Group) -> None:
        self.layout = layout
        self.group = group
        self.data = flatten(parameters, layout)
        self._works: dict[int, PendingWork] = {}

    def start_gather(self, async_op: bool) -> None:
        """All-gather every bucket, in the order in which a forward pass uses them; with ``async_op`` do not wait."""
        assert not self._works, "a gather is still under way"
        for index in reversed(range(len(self.layout.buckets))):
            self.start_gather_of(index, async_op)

    def start_gather_of(self, bucket_index: int, async_op: bool) -> None:
        """All-gather one bucket; with ``async_op`` do not wait."""
        bucket = self.layout.buckets[bucket_index]
        start, end = bucket.shard(self.group.rank, self.group.size)
        whole = self.data[bucket.start : bucket.end]
        work = all_gather_into(whole, self.data[start:end], self.group, async_op)
        if work is not None:
            self._works[bucket_index] = work

    def is_pending(self, bucket_index: int) -> bool:
        """Return whether a bucket's gather has been started and not waited for."""
        return bucket_index in self._works

    def wait(self, bucket_index: int) -> None:
        """Wait until a bucket is gathered, if its gather is pending."""
        work = self._works.pop(bucket_index, None)
        if work is not None:
            work.wait()

    def wait_for_all(self) -> None:
        """Wait until every bucket is gathered."""
        while self._works:
            self.wait(next(iter(self._works)))


@dataclass(frozen=True, eq=False)
class ParamShard:
    """The elements ``[start, end)`` of a flattened parameter: their values and, once reduced, their gradient.

    Both are views: of the parameter's own memory and of the reduced gradients.

    Shapes: ``values, gradient: [end - start]``.
    """

    parameter: torch.nn.Parameter
    start: int
    end: int
    values: torch.Tensor
    gradient: torch.Tensor

    @property
    def spec(self) -> ParamSpec:
        return spec_of(self.parameter)

    def described(self, flat: torch.Tensor) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Split a tensor of this shard's length into views, each with the description of a box of the local parameter.

        Boxes that contain only padding are omitted.

        Shapes: ``flat: [end - start]``.
        """
        position = 0
        for box in flat_range_boxes(self.parameter.shape, self.start, self.end):
            view = flat[position : position + box.num_elements].view(box.shape)
            position += box.num_elements
            spec = self.spec.within(box)
            if spec.shards:
                yield spec, view


def send_in_float8(parameter: torch.nn.Parameter, num_scales: int = 1) -> None:
    """Mark a parameter to be all-gathered in FP8, with one scale for each of ``num_scales`` equal parts along dim 0.

    Each part is the weight of a separate matmul, such as an expert's.
    """
    assert len(parameter) % num_scales == 0
    parameter.num_float8_scales = num_scales  # type: ignore[attr-defined]


def is_sent_in_float8(parameter: torch.Tensor) -> bool:
    return "num_float8_scales" in parameter.__dict__


def num_float8_scales(parameter: torch.Tensor) -> int:
    return int(parameter.__dict__["num_float8_scales"])


@dataclass(frozen=True)
class _ScaledRange:
    """Elements ``[start, end)`` of a flat buffer that share a scale, and the index of this scale."""

    scale: int
    start: int
    end: int


class Float8FlatParameters(FlatParameters):
    """Flat parameters that are all-gathered as E4M3 with scales, and dequantized into the flat buffer.

    All ranks then hold the same values, including the owner of a shard. A scale is a power of two for the whole local
    parameter, or for one part of it, from an amax that the ranks compute with a small all-reduce before they send.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], layout: ParamLayout, group: Group) -> None:
        super().__init__(parameters, layout, group)
        numbers = [num_float8_scales(parameter) for parameter in parameters]
        self._lengths = [parameter.numel() // number for parameter, number in zip(parameters, numbers)]
        self._first_scales = list(accumulate(numbers, initial=0))
        # By bucket: the payload in flight, and all scales, of which only the bucket's are set.
        self._payloads: dict[int, torch.Tensor] = {}
        self._scales: dict[int, torch.Tensor] = {}

    @torch.no_grad()
    def start_gather(self, async_op: bool) -> None:
        """All-gather every bucket; with ``async_op`` do not wait."""
        assert not self._works, "a gather is still under way"
        indices = range(len(self.layout.buckets))
        scales = self._common_scales(indices)
        for index in reversed(indices):
            self._send(index, scales, async_op)

    @torch.no_grad()
    def start_gather_of(self, bucket_index: int, async_op: bool) -> None:
        """All-gather one bucket after its parameters' update; with ``async_op`` do not wait for the payload."""
        self._send(bucket_index, self._common_scales([bucket_index]), async_op)

    def wait(self, bucket_index: int) -> None:
        """Wait until a bucket is gathered, and dequantize it, if its gather is pending."""
        super().wait(bucket_index)
        if bucket_index in self._payloads:
            self._unpack(bucket_index)

    def _scaled_ranges(self, bucket: BucketLayout, start: int, end: int) -> Iterator[_ScaledRange]:
        """Yield the parts of the layout's range ``[start, end)``, one per scale."""
        for held in ranges_within(bucket.ranges, start, end):
            length, begin = self._lengths[held.index], start + held.position - held.start
            for number in range(held.start // length, -(-held.end // length)):
                first, last = max(held.start, number * length), min(held.end, (number + 1) * length)
                yield _ScaledRange(self._first_scales[held.index] + number, begin + first, begin + last)

    def _common_scales(self, bucket_indices: Sequence[int]) -> torch.Tensor:
        """Return all scales, identical on all ranks; scales of parameters outside the given buckets are 1."""
        amax = torch.zeros(self._first_scales[-1], device=self.data.device)
        for bucket in (self.layout.buckets[index] for index in bucket_indices):
            for scaled in self._scaled_ranges(bucket, *bucket.shard(self.group.rank, self.group.size)):
                amax[scaled.scale] = self.data[scaled.start : scaled.end].abs().amax()
        all_reduce(amax, self.group, "max")
        return scale_of(amax, E4M3)

    def _send(self, bucket_index: int, scales: torch.Tensor, async_op: bool) -> None:
        bucket = self.layout.buckets[bucket_index]
        start, end = bucket.shard(self.group.rank, self.group.size)
        payload = torch.zeros(bucket.num_elements, dtype=torch.uint8, device=self.data.device)
        for scaled in self._scaled_ranges(bucket, start, end):
            values = self.data[scaled.start : scaled.end].unsqueeze(0)
            rounded = quantize(values, E4M3, WHOLE, scales[scaled.scale].view(1, 1)).data.view(torch.uint8)[0]
            payload[scaled.start - bucket.start : scaled.end - bucket.start] = rounded
        self._payloads[bucket_index], self._scales[bucket_index] = payload, scales
        work = all_gather_into(payload, payload[start - bucket.start : end - bucket.start], self.group, async_op)
        if work is not None:
            self._works[bucket_index] = work
        else:
            self._unpack(bucket_index)

    @torch.no_grad()
    def _unpack(self, bucket_index: int) -> None:
        bucket, payload = self.layout.buckets[bucket_index], self._payloads.pop(bucket_index)
        scales = self._scales.pop(bucket_index)
        for scaled in self._scaled_ranges(bucket, bucket.start, bucket.end):
            sent = payload[scaled.start - bucket.start : scaled.end - bucket.start].view(E4M3)
            numbers = Quantized(sent.unsqueeze(0), scales[scaled.scale].view(1, 1), WHOLE)
            self.data[scaled.start : scaled.end] = numbers.values()[0]
