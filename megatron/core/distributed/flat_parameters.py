"""Flat parameters: one buffer for each dtype, gathered from shards, and the part of each that a rank updates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_gather_into
from megatron.core.distributed.param_layout import ParamLayout
from megatron.core.flight.communication import PendingWork
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, flat_range_boxes, spec_of


class FlatParameters:
    """Move parameters into one flat buffer, whose buckets are gathered from the data-parallel ranks' shards.

    The parameters become views of the buffer.

    Shapes: ``data: [layout.num_elements]``; padding between parameters is zero and stays so.
    """

    def __init__(self, parameters: Sequence[torch.nn.Parameter], layout: ParamLayout, group: Group) -> None:
        self.layout = layout
        self.group = group
        first = parameters[0]
        self.data = torch.zeros(layout.num_elements, dtype=first.dtype, device=first.device)
        for slot in layout.slots:
            parameter = parameters[slot.index]
            view = self.data[slot.start : slot.end].view(parameter.shape)
            view.copy_(parameter.detach())
            parameter.data = view
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
        """Wait until a bucket is gathered; return at once where it is."""
        work = self._works.pop(bucket_index, None)
        if work is not None:
            work.wait()

    def wait_for_all(self) -> None:
        """Wait until every bucket is gathered."""
        while self._works:
            self.wait(next(iter(self._works)))


@dataclass(frozen=True, eq=False)
class ParamPart:
    """Hold the elements ``[start, end)`` of a flattened parameter: their values and, once reduced, their gradient.

    Both are views: of the parameter's own memory and of where the gradients of an iteration end up.

    Shapes: ``values, gradient: [end - start]``.
    """

    parameter: torch.nn.Parameter
    start: int
    end: int
    values: torch.Tensor
    gradient: torch.Tensor

    @property
    def spec(self) -> ParamSpec:
        """Return the description of the whole local parameter."""
        return spec_of(self.parameter)

    def described(self, flat: torch.Tensor) -> Iterator[tuple[ParamSpec, torch.Tensor]]:
        """Cut a tensor of this part's length into views, each with the description of a box of the local parameter.

        Boxes that are padding only are left out.

        Shapes: ``flat: [end - start]``.
        """
        position = 0
        for box in flat_range_boxes(self.parameter.shape, self.start, self.end):
            view = flat[position : position + box.num_elements].view(box.shape)
            position += box.num_elements
            spec = self.spec.within(box)
            if spec.pieces:
                yield spec, view
