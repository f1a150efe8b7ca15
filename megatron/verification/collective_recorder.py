"""Count what a layout sends: every communication of a training step of any rank of any world, without a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.device import Device
from megatron.core.process_group import CollectiveCall
from megatron.core.timers import Timers
from megatron.planning.closed_forms import Traffic, Volume
from megatron.training.config.run_config import RunConfig
from megatron.training.model_setup import ModelProvider, build_training_parts
from megatron.training.process.initialize import make_runtime
from megatron.training.train_state import TrainState
from megatron.training.training_step import ForwardStep, TrainingStep
from megatron.verification.run_cell import make_source


class CollectiveRecorder:
    """Keep every communication that it is told of, in order; give it to groups as their observer."""

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []

    def __call__(self, call: CollectiveCall) -> None:
        """Note a communication."""
        self.calls.append(call)

    def traffic(self) -> Traffic:
        """Return how many communications there were and their bytes, summed by operation and axes."""
        totals: Traffic = {}
        for call in self.calls:
            key = (call.operation, call.axes)
            totals[key] = totals.get(key, Volume(0, 0)) + Volume(1, call.num_bytes)
        return totals


def record_step(
    config: RunConfig, rank: int, model_provider: ModelProvider, forward_step: ForwardStep, data: str = "plain"
) -> Traffic:
    """Return what ``rank`` of the configuration's world sends in one training step.

    This process stands in for the rank, on torch's fake backend: nothing leaves it, and what would arrive is zeros, so
    that the numbers of the step mean nothing and only what is sent, and how much, does.
    """
    recorder = CollectiveRecorder()
    with stand_in(rank, config.world_size):
        runtime = make_runtime(config, Device("cpu"), observer=recorder)
        parts = build_training_parts(config, runtime, model_provider, log=lambda line: None)
        step = TrainingStep(config, runtime, parts, forward_step, Timers())
        recorder.calls.clear()
        with closing(make_source(config, runtime, data)) as source:
            step.run(TrainState(), source, config.training.global_batch_size, None)
        for chunk in parts.ddp_chunks:
            chunk.finish_param_gather()
    return recorder.traffic()


@contextmanager
def stand_in(rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a world that does not exist: every communication succeeds at once and brings zeros."""
    with _ZeroedMemory():  # type: ignore[no-untyped-call]
        if world_size == 1:
            yield
            return
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
        try:
            yield
        finally:
            dist.destroy_process_group()


_ALLOCATIONS = {torch.ops.aten.empty, torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.empty_strided}


class _ZeroedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Fill new memory with zeros: the fake backend leaves what it should fill as it is, and a NaN ends the step."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func.overloadpacket in _ALLOCATIONS else result
