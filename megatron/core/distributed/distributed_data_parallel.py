"""Data parallelism: gradients of a model chunk, collected in flat buffers and reduced over the replicas."""

from __future__ import annotations

import contextlib
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.distributed.flat_parameters import ParamShard, is_sent_in_float8
from megatron.core.distributed.fully_sharded_data_parallel import (
    ShardedGradBuffer,
    ShardedWeightBuffer,
    ShardedWeights,
    unit_labels,
)
from megatron.core.distributed.param_and_grad_buffer import (
    ParamAndGradBuffer,
    ReductionPlan,
    await_in_forward,
    is_small,
)
from megatron.core.distributed.param_layout import plan_buckets
from megatron.core.main_grad import main_grad_of
from megatron.core.parallel_state import ParallelState
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.sharding import spec_of
from megatron.core.weight_prefetch import alloc_storage


class LocalGradNorm(NamedTuple):
    """Norm of a parameter's gradient on this rank before the reduction; infinite or NaN if a value is not finite.

    ``is_always_known`` says whether the norm is also known after an iteration that does not record all norms.
    """

    name: str
    norm: float
    is_always_known: bool


class DistributedDataParallel(nn.Module):
    """Wrap one model chunk; its gradients are accumulated in main gradients and reduced over data × context parallel.

    Gradients of experts are reduced over the ranks that hold the same experts, in separate buckets.

    Call ``zero_grad_buffer`` before an iteration, run all backward passes but the last under ``no_sync``, and call
    ``finish_grad_sync`` after the last. With ``calculate_per_token_loss`` gradients are summed over the replicas (the
    caller divides by the number of tokens), otherwise averaged. A single replica uses the same code path without
    communication.

    If the configuration shards the optimizer and there are replicas (``is_sharded``), a rank ends with the reduced
    gradients of only its own shards, the parameters are views of flat buffers, and ``start_param_gather`` gathers the
    other ranks' updates. ``shards`` are what this rank updates, at any sharding. ``gathers_while_updating`` requests an
    update bucket by bucket, so that each bucket is gathered while the next is updated. With ``flat_weights`` unsharded
    parameters on CUDA become views of flat buffers too.

    Parameters without memory are allocated, or get zero-filled shards. If weights are sharded too, ``weights`` keeps
    the weights of ``layers``, ``first`` and the rest in memory only while they are used (see `ShardedWeights`);
    otherwise it is None.
    """

    def __init__(
        self,
        module: nn.Module,
        config: DistributedDataParallelConfig,
        state: ParallelState,
        *,
        calculate_per_token_loss: bool = False,
        layers: Sequence[nn.Module] = (),
        first: nn.Module | None = None,
        flat_weights: bool = False,
    ) -> None:
        super().__init__()
        self.module = module
        self.config = config
        self.is_last_microbatch = True
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        for parameter in module.parameters():
            if not parameter.requires_grad:
                alloc_storage(parameter)
        groups = {spec_of(parameter).is_expert: state.replicas_of(spec_of(parameter)) for parameter in trained}
        self.is_sharded = any(config.shards_over(group.size) for group in groups.values())
        plan = ReductionPlan(
            average=not calculate_per_token_loss,
            average_in_collective=config.ddp_average_in_collective,
            record_local_norms=config.check_for_nan_in_loss_and_grad,
            fuse_accumulation=config.gradient_accumulation_fusion,
            flat_weights=flat_weights,
            num_averaged=state.dp_cp.size,
        )
        self._labels = unit_labels(module, layers, first)
        self.grad_buffers = tuple(
            buffer
            for is_expert, group in sorted(groups.items(), key=lambda item: item[0])
            for buffer in self._make_grad_buffers(
                [parameter for parameter in trained if spec_of(parameter).is_expert == is_expert], group, plan
            )
        )
        for buffer in self.grad_buffers:
            for parameter in buffer.parameters:
                parameter.register_post_accumulate_grad_hook(_move_into_main_grad)  # type: ignore[no-untyped-call]
        sharded = [buffer for buffer in self.grad_buffers if isinstance(buffer, ShardedWeightBuffer)]
        self.weights = ShardedWeights(module, layers, first, sharded) if sharded else None
        self._overlaps_gather = self.is_sharded and config.overlap_param_gather
        self.gathers_while_updating = self._overlaps_gather and config.overlap_param_gather_with_optimizer_step
        if self._overlaps_gather:
            await_in_forward(module, self.grad_buffers)

    def _make_grad_buffers(
        self, trained: Sequence[nn.Parameter], group: Group, plan: ReductionPlan
    ) -> Iterator[ParamAndGradBuffer]:
        """Yield the gradient buffers of parameters that are replicated over a group."""
        is_sharded, num_replicas = self.config.shards_over(group.size), group.size
        copies: Group | None = None
        if is_sharded and group.levels is not None:
            group, copies = group.levels
        plan = replace(plan, shard=is_sharded, overlap=self.config.overlap_grad_reduce and group.size > 1)
        plan = replace(
            plan,
            copies=copies,
            user_buffers=self.config.has_user_buffers,
            symmetric=not self.config.disable_symmetric_registration,
        )
        by_kind: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in trained:
            in_float8 = is_sharded and is_sent_in_float8(parameter)
            by_kind.setdefault((parameter.dtype, in_float8), []).append(parameter)
        make = ParamAndGradBuffer
        if plan.shard and self.config.shards_gradients:
            make = ShardedWeightBuffer if self.config.shards_weights else ShardedGradBuffer
        if make is not ShardedWeightBuffer:
            for parameter in trained:
                alloc_storage(parameter)
        owner = weakref.ref(self)

        def is_last_microbatch() -> bool:
            # Captured layers hold autograd nodes, whose references the garbage collector does not see. If buffers held
            # a strong reference to the model, which holds the captured layers, none of it would be freed. Once the
            # model is freed, no gradients are reduced.
            ddp = owner()
            return ddp is None or ddp.is_last_microbatch

        for (dtype, _), parameters in by_kind.items():
            tied = [i for i, parameter in enumerate(parameters) if spec_of(parameter).is_tied_over_pipeline]
            units = [self._labels[id(parameter)] for parameter in parameters]
            layout = plan_buckets([p.numel() for p in parameters], tied, self.config, num_replicas, units)
            grad_dtype = dtype_from_name(self.config.grad_dtype(str(dtype).removeprefix("torch.")))
            yield make(parameters, layout, grad_dtype, group, plan, is_last_microbatch)

    @property
    def shards(self) -> tuple[ParamShard, ...]:
        """Return the parameters, or shards of parameters, that this rank updates."""
        return tuple(shard for buffer in self.grad_buffers for shard in buffer.shards)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the wrapped module."""
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self, *, ends_microbatch: bool = True) -> Iterator[None]:
        """Accumulate the gradients of the backward pass inside the context without finishing the reduction.

        Sharded gradients are nevertheless reduced after each micro-batch, at the latest at the end of this context.
        Without ``ends_microbatch`` a later pass computes the rest of the micro-batch's gradients.
        """
        self.is_last_microbatch = False
        try:
            yield
            if ends_microbatch:
                for buffer in self.grad_buffers:
                    buffer.end_microbatch()
                if self.weights is not None:
                    self.weights.free_all()
        finally:
            self.is_last_microbatch = True

    def zero_grad_buffer(self, records_all_norms: bool = False) -> None:
        """Start an iteration: discard accumulated gradients, without writing memory.

        With ``records_all_norms`` the iteration records the local norms of all gradients, not only of small ones.
        """
        for buffer in self.grad_buffers:
            buffer.reset()
            buffer.records_all_norms = records_all_norms

    def finish_grad_sync(self) -> None:
        """Wait until every gradient of ``shards`` holds the sum or the mean over the replicas."""
        for buffer in self.grad_buffers:
            buffer.finish_sync()
        if self.weights is not None:
            self.weights.free_all()

    def start_param_gather(self) -> None:
        """All-gather the parameters that other ranks have updated.

        With ``overlap_param_gather`` this returns at once, and each module waits for its own parameters when it is
        called. Call ``finish_param_gather`` before reading parameters outside a forward pass.
        """
        for buffer in self.grad_buffers:
            if buffer.flat_parameters is not None:
                buffer.flat_parameters.start_gather(async_op=self._overlaps_gather)

    def shards_and_gathers(self) -> Iterator[tuple[tuple[ParamShard, ...], Callable[[], None]]]:
        """Yield the shards of each bucket that this rank updates, and the function that gathers it, in forward order.

        The chunk must be sharded. Buckets that this rank holds whole need no gather.
        """
        for buffer in self.grad_buffers:
            if buffer.flat_parameters is None:
                yield buffer.shards, _gather_nothing
                continue
            for index in reversed(range(len(buffer.buckets))):
                gather = partial(buffer.flat_parameters.start_gather_of, index, async_op=self._overlaps_gather)
                yield buffer.shards_by_bucket[index], gather

    def finish_param_gather(self) -> None:
        """Wait until all parameters are gathered."""
        for buffer in self.grad_buffers:
            if buffer.flat_parameters is not None:
                buffer.flat_parameters.wait_for_all()

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every reduced gradient by a number or a one-element tensor."""
        for buffer in self.grad_buffers:
            buffer.scale(factor)

    def local_grad_norms(self) -> list[LocalGradNorm]:
        """Return the norms of parameters' gradients on this rank before the reduction, as far as they are known.

        The norms of large gradients are known if the iteration records all norms (see `zero_grad_buffer`), or if these
        gradients are not reduced. Only for error reports, because it waits for the device.
        """
        found = []
        for buffer in self.grad_buffers:
            is_reduced = buffer.group.size > 1
            for bucket in buffer.buckets:
                parameters, norms = buffer.parameters_of(bucket), bucket.local_norms
                if is_reduced:
                    parameters = tuple(parameters[index] for index in bucket.recorded)
                else:
                    norms = torch._foreach_norm([each.tensor for each in bucket.main_grads])
                for parameter, norm in zip(parameters, norms, strict=True):
                    is_always_known = not is_reduced or is_small(parameter)
                    found.append(LocalGradNorm(spec_of(parameter).name, float(norm), is_always_known))
        return found

    def names_of_bad_local_gradients(self) -> list[str]:
        """Return the names of parameters whose gradient on this rank is known not to be finite before the reduction.

        Only for error reports, because it waits for the device.
        """
        return [each.name for each in self.local_grad_norms() if not math.isfinite(each.norm)]


def _gather_nothing() -> None:
    """Do nothing: this rank holds the whole buffer."""


def _move_into_main_grad(parameter: torch.Tensor) -> None:
    # Autograd also runs the hook, without a gradient, for weights whose function wrote to the main gradient itself.
    if parameter.grad is None:
        return
    main_grad = main_grad_of(parameter)
    assert main_grad is not None
    main_grad.add(parameter.grad)
    parameter.grad = None
