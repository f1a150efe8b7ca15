"""Sharded gradients (ZeRO-2) and fully sharded data parallelism (FSDP, ZeRO-3).

ZeRO-2: between micro-batches a rank keeps only its own shards of the accumulated gradient.
ZeRO-3: a rank keeps only its own shards of the weights, and a layer's whole weights only while a pass runs through it.
Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054; Zhao et al. 2023, https://arxiv.org/abs/2304.11277.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron.core.collectives import all_gather_into
from megatron.core.distributed.flat_parameters import ParamShard
from megatron.core.distributed.param_and_grad_buffer import BucketShard, ParamAndGradBuffer, ReductionPlan
from megatron.core.distributed.param_layout import MIN_POOL_SIZE, ParamLayout, ranges_within
from megatron.core.flight_recorder import PendingWork
from megatron.core.main_grad import MainGrad, gradient_uses_of
from megatron.core.process_group import Group
from megatron.core.sharding import attach_held
from megatron.core.weight_prefetch import WeightPrefetch, has_memory


class BucketPool:
    """Pool of full-size bucket buffers: reuses returned buffers, and allocates a new one if all are in use.

    Shapes: each loan is ``[max_elements]``.
    """

    def __init__(self, max_elements: int, dtype: torch.dtype, device: torch.device) -> None:
        self._new = functools.partial(torch.zeros, max_elements, dtype=dtype, device=device)
        self._free: list[torch.Tensor] = []
        self.num_allocated = 0

    @property
    def has_free(self) -> bool:
        return bool(self._free)

    def take(self) -> torch.Tensor:
        """Take a buffer with arbitrary contents."""
        if self._free:
            return self._free.pop()
        self.num_allocated += 1
        return self._new()

    def give(self, memory: torch.Tensor) -> None:
        """Return a buffer to the pool."""
        self._free.append(memory)


@dataclass(frozen=True, eq=False)
class _Reduction:
    """Reduction in flight; ``addend`` is to be added to the shard, or None if the result was written there."""

    memory: torch.Tensor
    work: PendingWork | None
    shard: torch.Tensor
    addend: torch.Tensor | None


class ShardedGradBuffer(ParamAndGradBuffer):
    """Gradient buffer that reduce-scatters every bucket into this rank's shard after every micro-batch (ZeRO-2).

    A bucket takes full-size memory from a pool when the first gradient of a backward pass arrives, and returns it when
    its sum over the ranks has been added to the shard. Every backward pass reduces each bucket once on every rank, even
    if some of its parameters are unused. ``end_microbatch`` must follow every backward pass but the last.

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
        # Placeholder for a gradient's tensor while its bucket has no memory: right dtype, no elements.
        self._nothing = torch.empty(0, dtype=grad_dtype, device=parameters[0].device)
        self.pool = BucketPool(max(b.num_elements for b in layout.buckets), grad_dtype, parameters[0].device)
        super().__init__(parameters, layout, grad_dtype, group, plan, counts_as_last_microbatch)
        self._memory: dict[int, torch.Tensor] = {}
        self._under_way: deque[_Reduction] = deque()
        self._has_sum = [False] * len(self.buckets)

    def reset(self) -> None:
        """Discard the accumulated gradients."""
        assert not self._under_way, "a reduction is still under way"
        for index in list(self._memory):
            self.pool.give(self._release(index))
        self._has_sum = [False] * len(self.buckets)
        super().reset()

    def end_microbatch(self) -> None:
        """Reduce the buckets that are incomplete because the backward pass did not use all their parameters."""
        while self._num_started or any(self._is_open(index) for index in range(len(self.buckets))):
            self._finish_round()

    def start_sync(self) -> None:
        """Start all remaining reductions; buckets without any gradient since the reset reduce zeros."""
        self.end_microbatch()
        if not all(self._has_sum):
            self._finish_round()

    def finish_sync(self) -> None:
        """Start all remaining reductions, and wait until the shards hold the sum of all micro-batches."""
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

    def _make_bucket_shards(self) -> Iterable[BucketShard]:
        position = 0
        for bucket in self.layout.buckets:
            start, end = bucket.shard(self.group.rank, self.group.size)
            yield BucketShard(start, end, self.grad_data[position : position + end - start])
            position += end - start

    def _borrow(self, index: int) -> None:
        if index in self._memory:
            return
        while self._under_way and not self.pool.has_free and self.pool.num_allocated >= MIN_POOL_SIZE:
            self._settle()
        bucket = self.buckets[index]
        memory = self._memory[index] = self.pool.take()
        position = 0
        for each, main_grad in zip(bucket.layout.ranges, bucket.main_grads, strict=True):
            start, end = each.position - bucket.layout.start, each.end_position - bucket.layout.start
            _clear(memory, position, start)
            main_grad.tensor = memory[start:end].view(self.parameters[each.index].shape)
            position = end
        _clear(memory, position, bucket.layout.num_elements)

    def _release(self, index: int) -> torch.Tensor:
        """Detach a bucket's memory, and prepare the bucket for the next micro-batch's gradients."""
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
        """Start the next bucket's reduction; the last bucket is followed by the first one of the next micro-batch."""
        index = self._num_started
        self._num_started = (index + 1) % len(self.buckets)
        bucket, bucket_shard = self.buckets[index], self.bucket_shards[index]
        for main_grad in bucket.main_grads:
            main_grad.fill_if_empty()
        memory = self._memory[index]
        own = slice(bucket_shard.start - bucket.layout.start, bucket_shard.end - bucket.layout.start)
        is_first = not self._has_sum[index]
        self._has_sum[index] = True
        target = bucket_shard.gradient if is_first else memory[own]
        work = self._reduce(bucket, memory[: bucket.layout.num_elements], target)
        self._release(index)
        self._under_way.append(_Reduction(memory, work, bucket_shard.gradient, None if is_first else target))
        if not self.plan.overlap:
            self._settle()

    def _settle(self) -> None:
        """Wait for the oldest reduction, add its result to its shard and return its memory to the pool."""
        reduction = self._under_way.popleft()
        if reduction.work is not None:
            reduction.work.wait()
        if reduction.addend is not None:
            reduction.shard.add_(reduction.addend)
        self.pool.give(reduction.memory)


def _clear(memory: torch.Tensor, start: int, end: int) -> None:
    """Zero padding, because it is reduced with the rest and another bucket may have written to it."""
    if start < end:
        memory[start:end].zero_()


class WeightShards:
    """This rank's shard of every bucket of weights, with all-gather of whole buckets (ZeRO-3).

    The parameters are views of the whole buckets, whose storage is freed and allocated repeatedly, so that autograd's
    references to them stay valid. A parameter has its values between `use` and `free`. The shards of parameters without
    memory are zero until they are filled.

    Shapes: ``data: [layout.num_elements / group.size]``, the shards of all buckets concatenated.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], layout: ParamLayout, group: Group) -> None:
        self.layout = layout
        self.group = group
        first = parameters[0]
        self.data = torch.zeros(layout.num_elements // group.size, dtype=first.dtype, device=first.device)
        self._shards: list[torch.Tensor] = []
        self._whole: list[torch.Tensor] = []
        self._works: dict[int, PendingWork] = {}
        self._is_here = [True] * len(layout.buckets)
        position = 0
        for index, bucket in enumerate(layout.buckets):
            filled = {each.index for each in bucket.ranges if has_memory(parameters[each.index])}
            # Without a value to copy, the memory is never touched before it is freed, so it costs the process nothing.
            make = torch.zeros if filled else torch.empty
            whole = make(bucket.num_elements, dtype=first.dtype, device=first.device)
            for each in bucket.ranges:
                parameter = parameters[each.index]
                view = whole[each.position - bucket.start : each.end_position - bucket.start].view(parameter.shape)
                if each.index in filled:
                    view.copy_(parameter.detach())
                parameter.data = view
            start, end = bucket.shard(group.rank, group.size)
            shard = self.data[position : position + end - start]
            position += end - start
            if filled:
                shard.copy_(whole[start - bucket.start : end - bucket.start])
            self._shards.append(shard)
            self._whole.append(whole)
            self.free(index)

    def begin(self, bucket_index: int) -> None:
        """Start gathering a bucket, unless it is present or in flight."""
        if self._is_here[bucket_index]:
            return
        whole = self._whole[bucket_index]
        whole.untyped_storage().resize_(whole.numel() * whole.element_size())
        work = all_gather_into(whole, self._shards[bucket_index], self.group, async_op=True)
        if work is not None:
            self._works[bucket_index] = work
        self._is_here[bucket_index] = True

    def use(self, bucket_index: int) -> None:
        """Gather a bucket, if this has not started, and wait for it."""
        self.begin(bucket_index)
        work = self._works.pop(bucket_index, None)
        if work is not None:
            work.wait()

    def free(self, bucket_index: int) -> None:
        """Free a bucket's memory, if it is allocated."""
        if self._is_here[bucket_index]:
            work = self._works.pop(bucket_index, None)
            if work is not None:
                work.wait()
            self._whole[bucket_index].untyped_storage().resize_(0)
            self._is_here[bucket_index] = False


class ShardedWeightBuffer(ShardedGradBuffer):
    """Buffer of sharded weights and sharded gradients; this rank updates its shards of both."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        layout: ParamLayout,
        grad_dtype: torch.dtype,
        group: Group,
        plan: ReductionPlan,
        counts_as_last_microbatch: Callable[[], bool],
    ) -> None:
        self.weights = WeightShards(parameters, layout, group)
        super().__init__(parameters, layout, grad_dtype, group, plan, counts_as_last_microbatch)
        held: dict[int, list[ParamShard]] = {index: [] for index in range(len(parameters))}
        index_of = {id(parameter): index for index, parameter in enumerate(parameters)}
        for shard in self.shards:
            held[index_of[id(shard.parameter)]].append(shard)
        for index, shards in held.items():
            attach_held(parameters[index], [box for shard in shards for box in shard.described(shard.values)])

    def _keep_weights(self) -> None:
        """Do nothing: sharded weights are not gathered after an update, but when passes need them."""
        self.flat_parameters = None

    def _shards_of(self, bucket_shard: BucketShard) -> Iterable[ParamShard]:
        # The shards of weights are concatenated like the shards of gradients.
        begin = bucket_shard.gradient.storage_offset() - self.grad_data.storage_offset()
        values = self.weights.data[begin : begin + bucket_shard.end - bucket_shard.start]
        for held in ranges_within(self.layout.ranges, bucket_shard.start, bucket_shard.end):
            own = slice(held.position, held.end_position)
            yield ParamShard(self.parameters[held.index], held.start, held.end, values[own], bucket_shard.gradient[own])


class _Unit:
    """Weights that are gathered and freed together: those of a layer, in buckets of one or more buffers."""

    def __init__(self) -> None:
        self.buckets: list[tuple[WeightShards, int]] = []

    def begin(self) -> None:
        for shards, index in self.buckets:
            shards.begin(index)

    def use(self) -> None:
        self.begin()
        for shards, index in self.buckets:
            shards.use(index)

    def free(self) -> None:
        for shards, index in self.buckets:
            shards.free(index)


class ShardedWeights(WeightPrefetch):
    """Whole weights of a chunk, gathered layer by layer as its passes run, with prefetching of the next layer.

    The code that runs ``layers`` announces them, see `WeightPrefetch`. The weights of ``first``, which runs before the
    layers, are gathered only for its forward pass: its backward pass must not need them. All other weights are gathered
    for a forward pass of the chunk, and stay until its backward pass has ended, or, without one, until the forward pass
    has ended.
    """

    def __init__(
        self,
        chunk: nn.Module,
        layers: Sequence[nn.Module],
        first: nn.Module | None,
        buffers: Sequence[ShardedWeightBuffer],
    ) -> None:
        units = [_Unit() for _ in layers]
        self._first, self._rest = _Unit(), _Unit()
        super().__init__(layers, units)
        self.is_away = True
        labels = unit_labels(chunk, layers, first)
        named = {REST: self._rest, FIRST: self._first} | dict(enumerate(units))
        for buffer in buffers:
            for index, bucket in enumerate(buffer.buckets):
                (label,) = {labels[id(parameter)] for parameter in buffer.parameters_of(bucket)}
                named[label].buckets.append((buffer.weights, index))
        self._all = tuple(named.values())
        self._hook(chunk, first)

    def follow_chunk(self, chunk: nn.Module, layers: Sequence[nn.Module], first: nn.Module | None) -> None:
        """Also gather the weights for the passes of another chunk, which shares the parameters."""
        self.follow(layers)
        self._hook(chunk, first)

    def _hook(self, chunk: nn.Module, first: nn.Module | None) -> None:
        chunk.register_forward_pre_hook(self._begin_forward)
        chunk.register_forward_hook(self._end_forward)
        if first is not None:
            first.register_forward_pre_hook(self._begin_first)
            first.register_forward_hook(self._end_first)

    def use_all(self) -> None:
        """Gather all weights and keep them until they are freed."""
        for unit in self._all:
            unit.use()

    def free_all(self) -> None:
        """Free all weights, after a micro-batch's backward pass or when they are no longer needed."""
        for unit in self._all:
            unit.free()

    def _begin_forward(self, chunk: nn.Module, arguments: object) -> None:
        self._rest.use()

    def _end_forward(self, chunk: nn.Module, arguments: object, output: Any) -> None:
        if not torch.is_grad_enabled():
            self.free_all()
        elif isinstance(output, torch.Tensor) and output.requires_grad:
            # The backward pass of another micro-batch may have freed the weights since.
            output.register_hook(lambda grad: self._rest.use())  # type: ignore[no-untyped-call]

    def _begin_first(self, module: nn.Module, arguments: object) -> None:
        self._first.use()
        for unit in self._weights[:1]:
            unit.begin()

    def _end_first(self, module: nn.Module, arguments: object, output: object) -> None:
        self._first.free()


FIRST, REST = -1, -2
"""Labels of parameters outside the layers: of the module before the layers, and of everything else."""


def unit_labels(chunk: nn.Module, layers: Sequence[nn.Module], first: nn.Module | None) -> dict[int, int]:
    """Return, by parameter id, the index of the parameter's layer, or `FIRST` or `REST`."""
    labels = {id(parameter): REST for parameter in chunk.parameters()}
    if first is not None:
        labels |= {id(parameter): FIRST for parameter in first.parameters()}
    for number, layer in enumerate(layers):
        labels |= {id(parameter): number for parameter in layer.parameters()}
    return labels
