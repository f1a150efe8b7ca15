"""Gradient buffer of the parameters of one dtype, reduced over the data-parallel ranks bucket by bucket."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import nn

from megatron.core.collectives import all_reduce, reduce_scatter_into
from megatron.core.distributed.flat_parameters import (
    FlatParameters,
    Float8FlatParameters,
    ParamShard,
    flatten,
    is_sent_in_float8,
)
from megatron.core.distributed.param_layout import BucketLayout, ParamLayout, ranges_within
from megatron.core.distributed.user_buffers import UserBuffers, make_user_buffers
from megatron.core.flight_recorder import PendingWork
from megatron.core.main_grad import MainGrad, attach_main_grad, gradient_uses_of
from megatron.core.ops import adds_wide_products
from megatron.core.process_group import Group


@dataclass(frozen=True)
class ReductionPlan:
    """Reduction of gradients over the data-parallel ranks.

    - ``average`` divides by the number of ranks: in a pass before the sum, or in the collective with
      ``average_in_collective``. NCCL implements the average of floating-point numbers as a sum of pre-multiplied values
      (PreMulSum), which NVLS does not support.
      ``num_averaged`` is this number if it differs from the group size: ranks that hold the same expert also receive
      tokens of other ranks.
    - ``overlap`` starts reducing a bucket as soon as its last gradient has arrived.
    - ``record_local_norms`` keeps the norms of small gradients before the reduction: afterwards no rank could tell
      which rank contributed a non-finite value. Norms of all gradients take a read of all gradients, so they are kept
      only while a failed step is computed again.
    - ``fuse_accumulation`` adds a weight gradient's matmul to the main gradient in one kernel, without rounding it to
      16 bits first, if the device supports it.
    - ``shard`` leaves each rank with the sum of only its own shard of each bucket (reduce-scatter). The parameters are
      then in a flat buffer of the same layout, and are all-gathered from the shards after the update.
    - ``flat_weights`` moves unsharded parameters on CUDA to a flat buffer too, so that one kernel can update them.
    - ``user_buffers`` allocates the gradients and the flat parameters as user buffers of NCCL, in ``symmetric`` memory
      or not.
    - ``copies`` are the ranks that hold copies of this rank's shards, if shards are not spread over all ranks. The
      gradients of the shards are finally summed over them.
    """

    average: bool = True
    average_in_collective: bool = False
    overlap: bool = False
    record_local_norms: bool = False
    fuse_accumulation: bool = False
    shard: bool = False
    flat_weights: bool = False
    num_averaged: int | None = None
    copies: Group | None = None
    user_buffers: bool = False
    symmetric: bool = True


@dataclass(frozen=True, eq=False)
class BucketShard:
    """Range ``[start, end)`` of the buffer's layout of which this rank uses the reduced gradients.

    Shapes: ``gradient: [end - start]``.
    """

    start: int
    end: int
    gradient: torch.Tensor


_LARGEST_SMALL = 2**17


def is_small(gradient: torch.Tensor) -> bool:
    """Return whether the local norm of a gradient of this size is recorded in every step."""
    return gradient.numel() <= _LARGEST_SMALL


@dataclass
class GradBucket:
    """One bucket of the buffer, and its state since the last reset.

    ``local_norms`` has the norms of the main gradients with the indices ``recorded``.
    """

    layout: BucketLayout
    main_grads: tuple[MainGrad, ...]
    completed: set[int] = field(default_factory=set)
    work: PendingWork | None = None
    recorded: tuple[int, ...] = ()
    local_norms: tuple[torch.Tensor, ...] = ()

    @property
    def is_complete(self) -> bool:
        return len(self.completed) == len(self.main_grads)

    def reset(self) -> None:
        """Restart the count of completed gradients, and discard all accumulated gradients."""
        self.completed.clear()
        self.recorded = self.local_norms = ()
        for main_grad in self.main_grads:
            main_grad.reset()

    def add_local_norms(self, records_all: bool) -> None:
        """Add the norms of small main gradients, or of all; a non-finite value makes the sum non-finite.

        All additions between two resets must be of the same gradients.
        """
        tensors = [main_grad.tensor for main_grad in self.main_grads]
        recorded = [index for index, each in enumerate(tensors) if records_all or is_small(each)]
        if recorded:
            norms = torch._foreach_norm([tensors[index] for index in recorded])
            self.local_norms = tuple(torch._foreach_add(self.local_norms, norms) if self.local_norms else norms)
            self.recorded = tuple(recorded)


class ParamAndGradBuffer:
    """Main gradients of parameters that share a parameter dtype and a gradient dtype.

    Buckets are reduced strictly in buffer order, so that every data-parallel rank issues the same collectives in the
    same order even if a parameter is unused on some ranks. ``bucket_shards`` and ``shards`` are this rank's reduced
    gradients: the whole buffer or, if the plan shards, one shard of every bucket. ``shards_by_bucket`` has the
    parameters' shards for each of ``bucket_shards``.

    Shapes: ``grad_data: [layout.num_elements]``; padding between parameters is zero and stays so.
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
        self.parameters = tuple(parameters)
        self.layout = layout
        self.group = group
        self.plan = plan
        self._counts_as_last_microbatch = counts_as_last_microbatch
        self.records_all_norms = False
        """Whether the local norms of all gradients are recorded, not only the norms of small gradients."""
        first = parameters[0]
        self.flat_parameters: FlatParameters | None = None
        self._fuses_products = plan.fuse_accumulation and adds_wide_products(first.dtype, grad_dtype, first.device)
        self._user_buffers: UserBuffers | None = None
        if plan.user_buffers:
            self._user_buffers = make_user_buffers(group, first.device, is_symmetric=plan.symmetric)
        with nullcontext() if self._user_buffers is None else self._user_buffers.allocating():
            self._keep_weights()
            self.grad_data = torch.zeros(self._grad_length(), dtype=grad_dtype, device=first.device)
        self.buckets = tuple(self._make_bucket(index, bucket) for index, bucket in enumerate(layout.buckets))
        self.bucket_shards = tuple(self._make_bucket_shards())
        self.shards_by_bucket = tuple(tuple(self._shards_of(bucket_shard)) for bucket_shard in self.bucket_shards)
        self.shards = tuple(shard for shards in self.shards_by_bucket for shard in shards)
        self._num_started = 0

    def parameters_of(self, bucket: GradBucket) -> tuple[torch.nn.Parameter, ...]:
        """Return the bucket's parameters, in the order of its main gradients."""
        return tuple(self.parameters[each.index] for each in bucket.layout.ranges)

    def reset(self) -> None:
        """Discard the accumulated gradients without writing memory; the next contributions overwrite it."""
        assert all(bucket.work is None for bucket in self.buckets), "a reduction is still under way"
        self._num_started = 0
        for bucket in self.buckets:
            bucket.reset()

    def end_microbatch(self) -> None:
        """Do nothing after a micro-batch that is not the last: gradients accumulate locally."""

    def start_sync(self) -> None:
        """Start all remaining reductions; unused parameters count as zero."""
        while self._num_started < len(self.buckets):
            self._start_next_bucket()

    def finish_sync(self) -> None:
        """Start all remaining reductions, and wait until every bucket holds the reduced gradient."""
        self.start_sync()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None
        self._sum_copies()

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply every reduced gradient by a factor."""
        for bucket_shard in self.bucket_shards:
            bucket_shard.gradient.mul_(factor)

    def _sum_copies(self) -> None:
        """Sum the gradients of this rank's shards over the ranks that hold copies of these shards."""
        if self.plan.copies is not None:
            for bucket_shard in self.bucket_shards:
                all_reduce(bucket_shard.gradient, self.plan.copies)

    def _keep_weights(self) -> None:
        """Move the weights to a flat buffer, which is all-gathered after an update if the plan shards."""
        if self.plan.shard:
            kind = Float8FlatParameters if is_sent_in_float8(self.parameters[0]) else FlatParameters
            self.flat_parameters = kind(self.parameters, self.layout, self.group)
        elif self.plan.flat_weights and self.parameters[0].is_cuda:
            flatten(self.parameters, self.layout)

    def _grad_length(self) -> int:
        return self.layout.num_elements

    def _make_bucket(self, bucket_index: int, layout: BucketLayout) -> GradBucket:
        main_grads = []
        for each in layout.ranges:
            parameter = self.parameters[each.index]
            main_grad = self._make_main_grad(bucket_index, each.index, each.position, each.end_position)
            attach_main_grad(parameter, main_grad)
            main_grads.append(main_grad)
        return GradBucket(layout, tuple(main_grads))

    def _make_main_grad(self, bucket_index: int, parameter_index: int, start: int, end: int) -> MainGrad:
        parameter = self.parameters[parameter_index]
        return MainGrad(
            self.grad_data[start:end].view(parameter.shape),
            gradient_uses_of(parameter),
            on_complete=functools.partial(self._gradient_completed, bucket_index, parameter_index),
            fuses_products=self._fuses_products,
            is_awaited=self._reduces_at_once,
        )

    def _make_bucket_shards(self) -> Iterable[BucketShard]:
        if not self.plan.shard:
            yield BucketShard(0, self.layout.num_elements, self.grad_data)
            return
        for bucket in self.layout.buckets:
            start, end = bucket.shard(self.group.rank, self.group.size)
            yield BucketShard(start, end, self.grad_data[start:end])

    def _shards_of(self, bucket_shard: BucketShard) -> Iterable[ParamShard]:
        for held in ranges_within(self.layout.ranges, bucket_shard.start, bucket_shard.end):
            parameter = self.parameters[held.index]
            yield ParamShard(
                parameter,
                held.start,
                held.end,
                parameter.detach().view(-1)[held.start : held.end],
                bucket_shard.gradient[held.position : held.end_position],
            )

    def _gradient_completed(self, bucket_index: int, parameter_index: int) -> None:
        self._check_gathered(bucket_index)
        if not self._reduces_at_once():
            return
        completed = self.buckets[bucket_index].completed
        assert parameter_index not in completed, "a second last micro-batch: run all others under no_sync()"
        completed.add(parameter_index)
        while self._num_started < len(self.buckets) and self.buckets[self._num_started].is_complete:
            self._start_next_bucket()

    def _reduces_at_once(self) -> bool:
        """Return whether a bucket is reduced as soon as its gradients are complete."""
        return self.plan.overlap and self._counts_as_last_microbatch()

    def _check_gathered(self, bucket_index: int) -> None:
        is_stale = self.flat_parameters is not None and self.flat_parameters.is_pending(bucket_index)
        assert not is_stale, "a parameter was used outside its module's forward, before its new values were gathered"

    def _start_next_bucket(self) -> None:
        bucket = self.buckets[self._num_started]
        self._num_started += 1
        for main_grad in bucket.main_grads:
            main_grad.fill_if_empty()
        whole = self.grad_data[bucket.layout.start : bucket.layout.end]
        if self.group.size == 1:
            if self.plan.average and self.plan.num_averaged not in (None, 1):
                whole.mul_(1.0 / self.plan.num_averaged)
            return
        start, end = bucket.layout.shard(self.group.rank, self.group.size)
        bucket.work = self._reduce(bucket, whole, self.grad_data[start:end])

    def _reduce(self, bucket: GradBucket, whole: torch.Tensor, shard: torch.Tensor) -> PendingWork | None:
        """Reduce a full bucket in place or, if the plan shards, into ``shard``, which may be a part of it."""
        if self.plan.record_local_norms:
            bucket.add_local_norms(self.records_all_norms)
        op = "sum"
        if self.plan.average:
            num_averaged = self.plan.num_averaged or self.group.size
            if self.plan.average_in_collective and num_averaged == self.group.size:
                op = "avg"
            else:
                whole.mul_(1.0 / num_averaged)
        if self.plan.shard:
            return reduce_scatter_into(shard, whole, self.group, op, async_op=self.plan.overlap)
        return all_reduce(whole, self.group, op, async_op=self.plan.overlap)


def await_in_forward(module: nn.Module, buffers: Sequence[ParamAndGradBuffer]) -> None:
    """Make every submodule wait, when it is called, until the buckets of its own parameters are all-gathered.

    All-gathers thus overlap with the forward passes of earlier submodules. Other modules may use a parameter only after
    its own module has been called in the same forward pass.
    """
    bucket_of: dict[int, tuple[FlatParameters, int]] = {}
    for buffer in buffers:
        if buffer.flat_parameters is None:
            continue
        for index, bucket in enumerate(buffer.buckets):
            for parameter in buffer.parameters_of(bucket):
                bucket_of[id(parameter)] = (buffer.flat_parameters, index)
    for submodule in module.modules():
        own = [bucket_of[id(p)] for p in submodule.parameters(recurse=False) if id(p) in bucket_of]
        if own:
            submodule.register_forward_pre_hook(GatherHook(tuple(dict.fromkeys(own))))


@dataclass(frozen=True)
class GatherHook:
    """Forward pre-hook that waits for the all-gather of a module's parameters, and does not read its input."""

    awaited: tuple[tuple[FlatParameters, int], ...]

    def __call__(self, module: nn.Module, args: object) -> None:
        for parameters, index in self.awaited:
            parameters.wait(index)
