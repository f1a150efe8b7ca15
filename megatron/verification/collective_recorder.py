"""Record the collectives and messages of any rank of any layout, without a network."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.checkpoint import TrainState
from megatron.config import RunConfig
from megatron.core.collectives import any_rank
from megatron.core.device import Device
from megatron.core.distributed import check_replicas_equal
from megatron.core.process_group import CollectiveCall
from megatron.core.shared_memory import without_shared_memory
from megatron.core.timers import Timers
from megatron.training import (
    ForwardStep,
    ModelAndOptimizer,
    ModelProvider,
    Runtime,
    TrainingStep,
    build_model_and_optimizer,
    evaluate,
    make_runtime,
)
from megatron.training.fault_tolerance import AnomalyDetector
from megatron.verification.cells import Cell
from megatron.verification.communication_replay import Call, Operation
from megatron.verification.run_cell import make_source, resolve_cell
from megatron.verification.traffic import Traffic, Volume


class CollectiveRecorder:
    """Recorder of communication in order.

    ``calls`` are those that process groups report to it as their observer. ``operations`` are those that reach torch
    inside `recording`: these include the creation of groups, the receives, and calls inside or outside of the library's
    own collectives.
    """

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []
        self.operations: list[Operation] = []
        self._thread = threading.get_ident()
        self._reduction = ""
        self._together: list[Call] | None = None

    def __call__(self, call: CollectiveCall) -> None:
        """Record a communication."""
        self.calls.append(call)
        self._reduction = call.reduction
        if threading.get_ident() != self._thread:
            other = Call(call.operation, "_".join(call.axes), (), call.num_bytes, in_other_thread=True)
            self.operations.append((other,))

    def traffic(self) -> Traffic:
        """Sum the numbers of communications and their bytes by operation and axes."""
        totals: Traffic = {}
        for call in self.calls:
            key = (call.operation, call.axes)
            totals[key] = totals.get(key, Volume(0, 0)) + Volume(1, call.num_bytes)
        return totals

    def note(self, call: Call) -> None:
        """Record a call that reaches torch: a separate operation, or a part of one."""
        if self._together is None:
            self.operations.append((call,))
        else:
            self._together.append(call)

    @contextmanager
    def together(self) -> Iterator[None]:
        """Combine the calls recorded inside into one operation."""
        self._together = []
        try:
            yield
        finally:
            if self._together:
                self.operations.append(tuple(self._together))
            self._together = None

    def note_dispatched(self, func: Any, args: tuple[Any, ...]) -> None:
        """Record an operator of torch's distributed library."""
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args)}
        group = dist.ProcessGroup.unbox(given["process_group"])
        # Use the inputs if there are any: the outputs have their size on the ranks that have outputs.
        sent = given.get("input_tensors", args)
        tensors = [leaf for leaf in tree_leaves(sent) if isinstance(leaf, torch.Tensor)]
        ranks = tuple(dist.get_process_group_ranks(group))
        peer = given.get("dst", given.get("src"))
        details = [f"root {ranks[given['root_rank']]}"] if "root_rank" in given else []
        details += [self._reduction] if "reduce_op" in given else []
        num_bytes = sum(tensor.nbytes for tensor in tensors)
        if given.get("input_split_sizes"):
            # Each pair of ranks exchanges its own number of rows, so totals differ and only the size of a row is
            # common.
            num_bytes = tensors[0].shape[1:].numel() * tensors[0].element_size()
            details.append("rows by count")
        call = Call(
            kind=func.overloadpacket.__name__.strip("_"),
            communicator=group.group_name,
            ranks=ranks,
            num_bytes=num_bytes,
            dtype="+".join(sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})),
            detail=" ".join(details),
            peer=None if peer is None else ranks[peer],
        )
        self.note(call)


def record_step(
    config: RunConfig, rank: int, model_provider: ModelProvider, forward_step: ForwardStep, data: str = "plain"
) -> Traffic:
    """Return the communication of one training step on ``rank`` of the configuration's world.

    This process simulates the rank on torch's fake backend: nothing is sent, and received data is zeros. So the values
    of the step are meaningless, and only the operations and their sizes are valid.
    """
    recorder = CollectiveRecorder()
    # Norms amplify gradients of zeros until they overflow; such a step is skipped and not examined.
    config = replace(config, ddp=replace(config.ddp, check_for_nan_in_loss_and_grad=False))
    with stand_in(rank, config.world_size):
        runtime = make_runtime(config, Device("cpu"), observer=recorder)
        parts = build_model_and_optimizer(config, runtime, model_provider, log=lambda line: None)
        guard = _guard(config, runtime, parts, forward_step, data)
        step = TrainingStep(config, runtime, parts, forward_step, Timers(), guard=guard)
        recorder.calls.clear()
        with closing(make_source(config, runtime, data)) as source:
            step.run(TrainState(), source, config.training.global_batch_size, None)
        for chunk in parts.ddp_chunks:
            chunk.finish_param_gather()
    return recorder.traffic()


def record_run(
    config: RunConfig,
    rank: int,
    model_provider: ModelProvider,
    forward_step: ForwardStep,
    data: str = "plain",
    num_steps: int = 1,
) -> list[Operation]:
    """Return the torch.distributed operations of ``rank`` of the configuration's world in a short run, in order.

    The run consists of the set-up, ``num_steps`` training steps, an evaluation, and the checks of a training loop
    between steps. Pipelines take the code path of backends other than gloo.
    """
    recorder = CollectiveRecorder()
    with stand_in(rank, config.world_size, recorder):
        runtime = make_runtime(config, Device("cpu"), observer=recorder)
        parts = build_model_and_optimizer(config, runtime, model_provider, log=lambda line: None)
        timers = Timers()
        guard = _guard(config, runtime, parts, forward_step, data)
        step = TrainingStep(config, runtime, parts, forward_step, timers, guard=guard)
        train_state = TrainState()
        with closing(make_source(config, runtime, data)) as source:
            for _ in range(num_steps):
                step.run(train_state, source, config.training.global_batch_size, None)
        with closing(make_source(config, runtime, data)) as source:
            evaluate(config, runtime, parts, forward_step, source, 2)
        _check(runtime, parts, timers)
    return recorder.operations


def record_cell(
    cell: Cell, model_provider: ModelProvider, forward_step: ForwardStep, dtype: str = "bfloat16"
) -> list[list[Operation]]:
    """Return the torch.distributed operations of each rank of a test case in a short run.

    Raises:
        ConfigurationError: the configuration is rejected.
    """
    config = resolve_cell(cell.flags, cell.world_size, dtype)
    # A norm of zeros multiplies gradients by 1/sqrt(epsilon), which would overflow over many layers.
    config = replace(config, model=replace(config.model, norm_epsilon=1.0))
    return [record_run(config, rank, model_provider, forward_step, cell.data) for rank in range(cell.world_size)]


def _guard(
    config: RunConfig, runtime: Runtime, parts: ModelAndOptimizer, forward_step: ForwardStep, data: str
) -> AnomalyDetector:
    """Create the anomaly detector of a run's steps."""
    return AnomalyDetector.without_run(
        config, runtime, parts, forward_step, partial(make_source, config, runtime, data)
    )


def _check(runtime: Runtime, parts: ModelAndOptimizer, timers: Timers) -> None:
    """Run the checks that a training loop makes on all ranks between steps."""
    for chunk in parts.ddp_chunks:
        chunk.finish_param_gather()
    parameters = [parameter for chunk in parts.chunks for parameter in chunk.parameters()]
    check_replicas_equal(parameters, runtime.state)
    parts.optimizer.params_norm()
    timers.report(runtime.state)
    any_rank(False, runtime.state.world)


@contextmanager
def recording(recorder: CollectiveRecorder) -> Iterator[None]:
    """Report all torch.distributed operations of this thread to a recorder, on any backend.

    No collective inside the context uses shared memory.
    """
    with _Noting(recorder), _noting_groups_and_batches(recorder), without_shared_memory():
        yield


@contextmanager
def _noting_groups_and_batches(recorder: CollectiveRecorder) -> Iterator[None]:
    new_group, batch = dist.new_group, dist.batch_isend_irecv

    def make_group(ranks: Sequence[int], **options: Any) -> Any:
        recorder.note(_call("new_group", None, new_ranks=tuple(sorted(ranks))))
        return new_group(ranks, **options)

    def batch_isend_irecv(operations: list[dist.P2POp]) -> list[dist.Work]:
        with recorder.together():
            return batch(operations)

    with patch.multiple(dist, new_group=make_group, batch_isend_irecv=batch_isend_irecv):
        yield


@contextmanager
def stand_in(rank: int, world_size: int, recorder: CollectiveRecorder | None = None) -> Iterator[None]:
    """Simulate one rank of a world: every communication succeeds at once and receives zeros.

    ``recorder`` gets all calls that reach torch.
    """
    with _ZeroedMemory(recorder), ExitStack() as stack:
        if world_size == 1:
            yield
            return
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        if recorder is not None:
            stack.enter_context(_noting_groups_and_batches(recorder))
            stack.enter_context(_objects_of_nobody(recorder))
        try:
            yield
        finally:
            dist.destroy_process_group()


@contextmanager
def _objects_of_nobody(recorder: CollectiveRecorder) -> Iterator[None]:
    """Return this rank's own object from object collectives: sizes differ by rank, and zeros are not a valid pickle."""

    def all_gather(values: list[Any], value: Any, group: dist.ProcessGroup | None = None) -> None:
        recorder.note(_call("all_gather_object", group))
        values[:] = [value] * len(values)

    def broadcast(values: list[Any], src: int, group: dist.ProcessGroup | None = None) -> None:
        recorder.note(_call("broadcast_object_list", group, detail=f"from {src}"))

    def gather(value: Any, values: list[Any] | None, dst: int, group: dist.ProcessGroup | None = None) -> None:
        recorder.note(_call("gather_object", group, detail=f"to {dst}"))
        if values is not None:
            values[:] = [value] * len(values)

    with patch.multiple(dist, all_gather_object=all_gather, broadcast_object_list=broadcast, gather_object=gather):
        yield


def _call(kind: str, group: dist.ProcessGroup | None, **details: Any) -> Call:
    group = group or dist.group.WORLD
    assert group is not None
    return Call(kind, group.group_name, tuple(dist.get_process_group_ranks(group)), **details)


_ALLOCATIONS = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided}


class _Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Report every operator of torch's distributed library to a recorder, if there is one."""

    def __init__(self, recorder: CollectiveRecorder | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recorder = recorder

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func.namespace == "c10d" and self._recorder is not None:
            self._recorder.note_dispatched(func, args)
        return self._run(func, args, kwargs or {})

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


class _ZeroedMemory(_Noting):  # type: ignore[no-untyped-call]
    """Fill new memory with zeros, because the fake backend leaves outputs unwritten, and a NaN would end the step."""

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func.overloadpacket is torch.ops.c10d.alltoall_base_ and not args[1].numel():
            # The fake backend copies the input to the output, and rejects an empty input.
            output, _, group, output_sizes, _, *further = args
            args = (output, torch.zeros_like(output), group, output_sizes, output_sizes, *further)
        result = func(*args, **kwargs)
        return result.zero_() if func.overloadpacket in _ALLOCATIONS else result
