"""Flat parameters that travel in fp8: weights whose only use is in fp8 products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.collectives import all_gather_into, all_reduce
from megatron.core.distributed.flat_parameters import FlatParameters
from megatron.core.distributed.param_layout import ParamLayout, parts_of_range
from megatron.core.kernels.float8.quantised import E4M3, WHOLE, Quantised, quantise, scale_of
from megatron.core.process_group import Group


def send_in_float8(parameter: torch.nn.Parameter) -> None:
    """Let a parameter travel in fp8 when it is gathered from shards."""
    parameter.is_sent_in_float8 = True  # type: ignore[attr-defined]


def is_sent_in_float8(parameter: torch.Tensor) -> bool:
    """Return whether a parameter travels in fp8."""
    return bool(parameter.__dict__.get("is_sent_in_float8", False))


class Float8FlatParameters(FlatParameters):
    """Gather parameters as E4M3 with a scale for each, and leave what the fp8 numbers stand for in the flat buffer.

    All ranks then hold the same numbers, the owner of a shard too. A scale is a power of two from the whole local
    parameter, whose amax the ranks find together in a small all-reduce before they send.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], layout: ParamLayout, group: Group) -> None:
        super().__init__(parameters, layout, group)
        self._num_parameters = len(parameters)
        # By bucket: what is on its way, and the scales of all parameters, of which the bucket's are set.
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
        """All-gather one bucket, whose parameters are updated; with ``async_op`` do not wait for its numbers."""
        self._send(bucket_index, self._common_scales([bucket_index]), async_op)

    def wait(self, bucket_index: int) -> None:
        """Wait until a bucket is gathered and unpacked; return at once where it is."""
        super().wait(bucket_index)
        if bucket_index in self._payloads:
            self._unpack(bucket_index)

    def _common_scales(self, bucket_indices: Sequence[int]) -> torch.Tensor:
        """Return the scale of every parameter of some buckets, the same on all ranks; 1 of others."""
        amax = torch.zeros(self._num_parameters, device=self.data.device)
        for bucket in (self.layout.buckets[index] for index in bucket_indices):
            start, end = bucket.shard(self.group.rank, self.group.size)
            for part in parts_of_range(bucket.slots, start, end):
                values = self.data[start + part.position : start + part.position + part.end - part.start]
                amax[part.index] = values.abs().amax()
        all_reduce(amax, self.group, "max")
        return scale_of(amax, E4M3)

    def _send(self, bucket_index: int, scales: torch.Tensor, async_op: bool) -> None:
        bucket = self.layout.buckets[bucket_index]
        start, end = bucket.shard(self.group.rank, self.group.size)
        payload = torch.zeros(bucket.num_elements, dtype=torch.uint8, device=self.data.device)
        own = payload[start - bucket.start : end - bucket.start]
        for part in parts_of_range(bucket.slots, start, end):
            length = part.end - part.start
            values = self.data[start + part.position : start + part.position + length]
            rounded = quantise(values.unsqueeze(0), E4M3, WHOLE, scales[part.index].view(1, 1))
            own[part.position : part.position + length] = rounded.data.view(torch.uint8)[0]
        self._payloads[bucket_index], self._scales[bucket_index] = payload, scales
        work = all_gather_into(payload, own, self.group, async_op)
        if work is not None:
            self._works[bucket_index] = work
        else:
            self._unpack(bucket_index)

    @torch.no_grad()
    def _unpack(self, bucket_index: int) -> None:
        bucket, payload = self.layout.buckets[bucket_index], self._payloads.pop(bucket_index)
        scales = self._scales.pop(bucket_index)
        for slot in bucket.slots:
            sent = payload[slot.start - bucket.start : slot.end - bucket.start].view(E4M3)
            numbers = Quantised(sent.unsqueeze(0), scales[slot.index].view(1, 1), WHOLE)
            self.data[slot.start : slot.end] = numbers.values()[0]
