"""One flat gradient buffer for parameters of one dtype, reduced over the data-parallel ranks bucket by bucket."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from megatron.core.collectives import all_reduce
from megatron.core.distributed.param_layout import BucketLayout, ParamLayout
from megatron.core.main_grad import MainGrad, attach_main_grad, gradient_uses_of
from megatron.core.process_group import Group


@dataclass(frozen=True)
class ReductionPlan:
    """Say how gradients are combined over the data-parallel ranks.

    ``average`` divides by the number of ranks: before the collective, or in it where ``average_in_collective``.
    ``overlap`` starts a bucket as soon as its last gradient has arrived. ``record_local_norms`` keeps each
    parameter's norm from before the reduction, after which nobody could tell which rank brought a bad value.
    """

    average: bool = True
    average_in_collective: bool = False
    overlap: bool = False
    record_local_norms: bool = False


@dataclass
class GradBucket:
    """Hold one bucket's slice of the buffer and what has happened to it since the last reset."""

    layout: BucketLayout
    data: torch.Tensor
    main_grads: tuple[MainGrad, ...]
    completed: set[int] = field(default_factory=set)
    work: dist.Work | None = None
    local_norms: tuple[torch.Tensor, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Return whether every parameter has its whole gradient."""
        return len(self.completed) == len(self.main_grads)

    def reset(self) -> None:
        """Expect a contribution to every parameter again."""
        self.completed.clear()
        self.local_norms = ()
        for main_grad in self.main_grads:
            main_grad.reset()


class ParamAndGradBuffer:
    """Own the main gradients of parameters that share a parameter and a gradient dtype.

    Buckets are reduced strictly in buffer order, so that every data-parallel rank issues the same collectives in the
    same order even where a parameter stays unused on some of them.

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
        self.grad_data = torch.zeros(layout.num_elements, dtype=grad_dtype, device=parameters[0].device)
        self.buckets = tuple(self._make_bucket(index, bucket) for index, bucket in enumerate(layout.buckets))
        self._num_started = 0

    def _make_bucket(self, bucket_index: int, layout: BucketLayout) -> GradBucket:
        main_grads = []
        for slot in layout.slots:
            parameter = self.parameters[slot.index]
            main_grad = MainGrad(
                self.grad_data[slot.start : slot.end].view(parameter.shape),
                gradient_uses_of(parameter),
                on_complete=functools.partial(self._gradient_completed, bucket_index, slot.index),
            )
            attach_main_grad(parameter, main_grad)
            main_grads.append(main_grad)
        return GradBucket(layout, self.grad_data[layout.start : layout.end], tuple(main_grads))

    def parameters_of(self, bucket: GradBucket) -> tuple[torch.nn.Parameter, ...]:
        """Return the bucket's parameters, in the order of its main gradients."""
        return tuple(self.parameters[slot.index] for slot in bucket.layout.slots)

    def reset(self) -> None:
        """Forget the accumulated gradients; memory is not touched, the next contributions overwrite it."""
        assert all(bucket.work is None for bucket in self.buckets), "a reduction is still under way"
        self._num_started = 0
        for bucket in self.buckets:
            bucket.reset()

    def start_sync(self) -> None:
        """Start the reduction of every bucket that has not been started; unused parameters count as zero."""
        while self._num_started < len(self.buckets):
            self._start_next_bucket()

    def finish_sync(self) -> None:
        """Start what has not been started, and wait until every bucket holds the reduced gradient."""
        self.start_sync()
        for bucket in self.buckets:
            if bucket.work is not None:
                bucket.work.wait()
                bucket.work = None

    def scale(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient."""
        self.grad_data.mul_(factor)

    def _gradient_completed(self, bucket_index: int, parameter_index: int) -> None:
        if not self.plan.overlap or not self._counts_as_last_microbatch():
            return
        completed = self.buckets[bucket_index].completed
        assert parameter_index not in completed, "a second last micro-batch: run all others under no_sync()"
        completed.add(parameter_index)
        while self._num_started < len(self.buckets) and self.buckets[self._num_started].is_complete:
            self._start_next_bucket()

    def _start_next_bucket(self) -> None:
        bucket = self.buckets[self._num_started]
        self._num_started += 1
        for main_grad in bucket.main_grads:
            main_grad.fill_if_empty()
        if self.group.size == 1:
            return
        if self.plan.record_local_norms:
            bucket.local_norms = tuple(torch._foreach_norm([grad.tensor for grad in bucket.main_grads]))
        op = "sum"
        if self.plan.average and self.plan.average_in_collective:
            op = "avg"
        elif self.plan.average:
            bucket.data.mul_(1.0 / self.group.size)
        bucket.work = all_reduce(bucket.data, self.group, op, async_op=self.plan.overlap)
