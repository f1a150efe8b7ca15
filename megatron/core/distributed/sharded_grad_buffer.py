"""Sharded gradients: a rank keeps only its own shards of the accumulated gradient between micro-batches.

Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054 (stage 2).
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch

from megatron.core.distributed.param_and_grad_buffer import GradSegment, ParamAndGradBuffer, ReductionPlan
from megatron.core.distributed.param_layout import MIN_POOL_SIZE, ParamLayout
from megatron.core.flight.communication import PendingWork
from megatron.core.main_grad import MainGrad, gradient_uses_of
from megatron.core.process_group import Group


class BucketPool:
    """Lend memory of a full bucket's size; reuse what was returned, and allocate where everything is lent.

    Shapes: each loan is ``[max_elements]``.
    """

    def __init__(self, max_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._new = functools.partial(torch.zeros, max_elements, dtype=dtype, device=device)
        self._free: list[torch.Tensor] = []
        self.num_allocated = 0

    @property
    def has_free(self) -> bool:
        """Return whether a loan needs no new memory."""
        return bool(self._free)

    def take(self) -> torch.Tensor:
        """Lend memory with any content."""
        if self._free:
            return self._free.pop()
        self.num_allocated += 1
        return self._new()

    def give(self, memory: torch.Tensor) -> None:
        """Take memory back."""
        self._free.append(memory)


@dataclass(frozen=True, eq=False)
class _Reduction:
    """Hold a reduction that has been started: ``addend`` is to be added to the shard unless it was written there."""

    memory: torch.Tensor
    work: PendingWork | None
    shard: torch.Tensor
    addend: torch.Tensor | None


class ShardedGradBuffer(ParamAndGradBuffer):
    """Reduce-scatter every bucket after every micro-batch into this rank's shard, and reuse full-size memory.

    A bucket borrows full-size memory when the first gradient of a backward pass comes, and returns it when its sum over
    the ranks has been added to the shard. Every backward pass reduces each bucket once on every rank, also where some
    of its parameters were unused. ``end_microbatch`` must follow every backward pass but the last.

    Shapes: ``grad_data: [layout.num_elements / group.size]``.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        layout: ParamLayout,
        grad_dtype: torch.dtype,
        group: Group,
        plan: ReductionPlan,
        counts_as_last_microbatch: Callable[[], bool],
    ) -> None:
        assert plan.shard
        # What a gradient's tensor is while its bucket has no memory: it has the dtype, and no element to write to.
        self._nothing = torch.empty(0, dtype=grad_dtype, device=parameters[0].device)
        self.pool = BucketPool(max(b.num_elements for b in layout.buckets), grad_dtype, parameters[0].device)
        super().__init__(parameters, layout, grad_dtype, group, plan, counts_as_last_microbatch)
        self._memory: dict[int, torch.Tensor] = {}
        self._under_way: deque[_Reduction] = deque()
        self._has_sum = [False] * len(self.buckets)

    def reset(self) -> None:
        """Forget the accumulated gradients."""
        assert not self._under_way, "a reduction is still under way"
        for index in list(self._memory):
            self.pool.give(self._release(index))
        self._has_sum = [False] * len(self.buckets)
        super().reset()

    def end_microbatch(self) -> None:
        """Reduce the buckets that the backward pass left open because it did not use all their parameters."""
        while self._num_started or any(self._is_open(index) for index in range(len(self.buckets))):
            self._finish_round()

    def start_sync(self) -> None:
        """Start every other reduction; buckets without any gradient since the reset reduce zeros."""
        self.end_microbatch()
        if not all(self._has_sum):
            self._finish_round()

    def finish_sync(self) -> None:
        """Start every other reduction, and wait until the shards hold the sum of all micro-batches."""
        self.start_sync()
        while self._under_way:
            self._settle()
        self._sum_copies()

    def _grad_length(self) -> int:
        return self.layout.num_elements // self.group.size

    def _make_main_grad(self, bucket_index: int, parameter_index: int, start: int, end: int) -> MainGrad:
        return MainGrad(
            self._nothing,
            gradient_uses_of(self.parameters[parameter_index]),
            on_complete=functools.partial(self._gradient_completed, bucket_index, parameter_index),
            on_begin=functools.partial(self._borrow, bucket_index),
            fuses_products=self._fuses_products,
        )

    def _make_segments(self) -> Iterable[GradSegment]:
        position = 0
        for bucket in self.layout.buckets:
            start, end = bucket.shard(self.group.rank, self.group.size)
            yield GradSegment(start, end, self.grad_data[position : position + end - start])
            position += end - start

    def _borrow(self, index: int) -> None:
        if index in self._memory:
            return
        while self._under_way and not self.pool.has_free and self.pool.num_allocated >= MIN_POOL_SIZE:
            self._settle()
        bucket = self.buckets[index]
        memory = self._memory[index] = self.pool.take()
        position = 0
        for slot, main_grad in zip(bucket.layout.slots, bucket.main_grads, strict=True):
            start, end = slot.start - bucket.layout.start, slot.end - bucket.layout.start
            _clear(memory, position, start)
            main_grad.tensor = memory[start:end].view(self.parameters[slot.index].shape)
            position = end
        _clear(memory, position, bucket.layout.num_elements)

    def _release(self, index: int) -> torch.Tensor:
        """Take a bucket's memory from it, and expect the next micro-batch's gradients."""
        bucket = self.buckets[index]
        bucket.completed.clear()
        for main_grad in bucket.main_grads:
            main_grad.reset()
            main_grad.tensor = self._nothing
        return self._memory.pop(index)

    def _is_open(self, index: int) -> bool:
        return any(not main_grad.is_empty for main_grad in self.buckets[index].main_grads)

    def _gradient_completed(self, bucket_index: int, parameter_index: int) -> None:
        self._check_gathered(bucket_index)
        self.buckets[bucket_index].completed.add(parameter_index)
        while self.buckets[self._num_started].is_complete:
            self._start_next_bucket()

    def _finish_round(self) -> None:
        self._start_next_bucket()
        while self._num_started:
            self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        """Start the next bucket's reduction; after the last one comes the first, of the next micro-batch."""
        index = self._num_started
        self._num_started = (index + 1) % len(self.buckets)
        bucket, segment = self.buckets[index], self.segments[index]
        for main_grad in bucket.main_grads:
            main_grad.fill_if_empty()
        memory = self._memory[index]
        own = slice(segment.start - bucket.layout.start, segment.end - bucket.layout.start)
        is_first = not self._has_sum[index]
        self._has_sum[index] = True
        target = segment.gradient if is_first else memory[own]
        work = self._reduce(bucket, memory[: bucket.layout.num_elements], target)
        self._release(index)
        self._under_way.append(_Reduction(memory, work, segment.gradient, None if is_first else target))
        if not self.plan.overlap:
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest reduction, add it to its shard and give its memory back."""
        reduction = self._under_way.popleft()
        if reduction.work is not None:
            reduction.work.wait()
        if reduction.addend is not None:
            reduction.shard.add_(reduction.addend)
        self.pool.give(reduction.memory)


def _clear(memory: torch.Tensor, start: int, end: int) -> None:
    """Set padding to zero: it is reduced with the rest, and another bucket may have left anything there."""
    if start < end:
        memory[start:end].zero_()
