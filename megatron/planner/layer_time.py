"""The time of a layer, and of the embedding, the output layer and the loss, for one micro-batch on one rank.

The layers of this program take the times of their traces. Layers of another program take those of the matmuls, of
attention and of the messages, and their own passes over memory.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.layer_kinds import LayerKind, layer_kinds
from megatron.planner.links import Links
from megatron.planner.memory_passes import loss_bytes, num_launches, passed_bytes
from megatron.planner.piece_time import LAUNCH_S, MEMORY_SHARE, OPERATOR_S, PieceTime, piece_time, sent_seconds
from megatron.planner.pieces import end_trace, layer_trace
from megatron.planner.plan import Plan
from megatron.planner.traces import PHASES, PieceMemory, PieceTrace


@dataclass(frozen=True)
class LayerTime:
    """Hold the seconds of a layer and a micro-batch by part; ``again`` is what full recompute computes a second time.

    ``expert_parallel`` is the tokens' way to their experts and back. ``forward`` and ``weight_gradients`` are the
    forward pass and the deferred weight gradients, within the parts. ``host`` is the time of the host to launch the
    layer once, and ``host_again`` to launch what is computed again. ``host_forward`` is its part for the forward pass,
    if the host waits for the device in that pass.
    """

    products: float
    attention: float
    passes: float
    tensor_parallel: float
    context_parallel: float
    again: float
    offload: float
    host: float = 0.0
    forward: float = 0.0
    expert_parallel: float = 0.0
    weight_gradients: float = 0.0
    host_forward: float = 0.0
    host_again: float = 0.0

    @property
    def total(self) -> float:
        """Return all parts together, or the time of the host if that is longer."""
        whole, host = self.device, self.host + self.host_again
        rest = max(host - self.host_forward, whole - self.forward)
        return max(self.host_forward, self.forward) + rest if self.host_forward else max(host, whole)

    @property
    def device(self) -> float:
        """Return the GPU time of all parts."""
        busy = self.products + self.attention + self.passes + self.again
        return busy + self.tensor_parallel + self.context_parallel + self.expert_parallel + self.offload

    @property
    def once(self) -> LayerTime:
        """Return the time without full recompute."""
        return dataclasses.replace(self, again=0.0, host_again=0.0)


def layer_time(
    plan: Plan, gpu: Gpu, implementation: Implementation, kept: PieceMemory, kind: LayerKind, number: int
) -> LayerTime:
    """Return the time of one layer, forward and backward, with the recompute that is configured.

    ``kept`` is the layer's memory. The host waits in the forward pass of a layer of experts, for how many tokens each
    expert has.
    """
    trace = layer_trace(plan, gpu.capability, number)
    time = piece_time(plan, gpu, implementation, trace)
    if not implementation.is_traced:
        passed, launches = passed_bytes(plan, implementation, kind), num_launches(plan, implementation, kind)
        passes = passed / (gpu.memory_bandwidth * implementation.times.pass_share)
        time = _of_other_program(plan, gpu, trace, time, passes, launches * LAUNCH_S)
    elif plan.uses_cuda_graphs:
        # A replayed pass is one launch.
        phases = (time.forward, time.backward, time.weights)
        time = PieceTime(*(dataclasses.replace(each, host=min(each.host, OPERATOR_S)) for each in phases))
    forward = time.forward.total
    return LayerTime(
        products=time.part("products"),
        attention=time.part("attention"),
        passes=time.part("passes"),
        tensor_parallel=time.part("tensor_parallel"),
        context_parallel=time.part("context_parallel"),
        expert_parallel=time.part("expert_parallel"),
        again=forward if plan.model.recompute_granularity == "full" else 0.0,
        offload=_offload(plan, gpu, kept, forward),
        host=time.part("host"),
        host_again=time.forward.host if plan.model.recompute_granularity == "full" else 0.0,
        forward=forward,
        weight_gradients=time.weights.total,
        host_forward=time.forward.host if kind.has_experts else 0.0,
    )


def end_times(plan: Plan, gpu: Gpu, implementation: Implementation) -> tuple[float, float]:
    """Return the time of the embedding, and of all that comes after the layers."""
    traces = [end_trace(plan, gpu.capability, has_loss=has_loss) for has_loss in (False, True)]
    first, last = (piece_time(plan, gpu, implementation, trace) for trace in traces)
    if not implementation.is_traced:
        passes = loss_bytes(plan) / (gpu.memory_bandwidth * MEMORY_SHARE)
        kinds = layer_kinds(plan.model, plan.seq_length)[plan.model.num_layers :]
        further = sum(passed_bytes(plan, implementation, kind) for kind in kinds)
        passes += further / (gpu.memory_bandwidth * implementation.times.pass_share)
        last = _of_other_program(plan, gpu, traces[1], last, passes, host=0.0)
    return max(first.total, first.part("host")), max(last.total, last.part("host"))


def _of_other_program(
    plan: Plan, gpu: Gpu, trace: PieceTrace, time: PieceTime, passes: float, host: float
) -> PieceTime:
    """Return the time of a piece of another program.

    Matmuls, attention and messages are those of the trace. ``passes`` is the time of the program's passes over memory,
    and ``host`` that of its launches. A third of both is in the forward pass.
    """
    shares = {"forward": 1 / 3, "backward": 2 / 3, "weights": 0.0}
    phases = {
        name: dataclasses.replace(
            getattr(time, name),
            passes=share * passes,
            host=share * host,
            tensor_parallel=_tensor_parallel(plan, gpu, trace, PHASES.index(name)),
        )
        for name, share in shares.items()
    }
    return PieceTime(**phases)


def _tensor_parallel(plan: Plan, gpu: Gpu, trace: PieceTrace, phase: int) -> float:
    """Return the time of the tensor-parallel messages in a pass of a piece.

    With sequence parallelism, all-reduces carry amaxes and the cross-entropy's sums alone. They are not counted.
    """
    operations = {"all_gather", "reduce_scatter", "send"} | (set() if plan.model.sequence_parallel else {"all_reduce"})
    links = Links(gpu, plan.parallel_sizes)
    return sum(
        sent_seconds(sent, links)
        for sent in trace.sent
        if sent.phase == phase and sent.axes == ("tp",) and sent.operation in operations
    )


def _offload(plan: Plan, gpu: Gpu, kept: PieceMemory, forward: float) -> float:
    """Return the exposed time of offloading a layer's activations to host memory and back."""
    if not (plan.model.cpu_offloading and plan.model.cpu_offloading_activations):
        return 0.0
    copy = kept.kept / (gpu.host_bandwidth * MEMORY_SHARE)
    return max(0.0, copy - forward) + max(0.0, copy - 2 * forward)
