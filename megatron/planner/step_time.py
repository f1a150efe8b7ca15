"""Time of a training step by part: pieces, layers, pipeline bubble, and the optimizer's update.

The step time is the time of all micro-batches on the slowest stage, plus the bubble and the work after the last pass.

Layers of this program take the time of their traces, computed with NumPy. A GEMM takes its FLOPs at the rate of large
GEMMs, plus the time to write its result. A grouped GEMM also reads the weights of each group. Attention takes its FLOPs
at published rates. All other operations take the bytes that they move. Each launch takes host time.

Layers of another program take the time of the traced GEMMs, attention and messages, and of that program's own memory
passes.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np

from megatron.core.pipeline_parallel import Durations, StageContents, build_schedule, simulate
from megatron.planner.communication import Links, exposed_replica_seconds, exposed_seconds
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation, loss_bytes, num_launches, passed_bytes
from megatron.planner.memory import ModelPieces, StageState, end_trace, layer_trace, recomputed_groups
from megatron.planner.plan import LayerKind, Plan, layer_kinds, layer_numbers
from megatron.planner.traces import ATTENTION, GEMM, PHASES, PieceMemory, PieceTrace, Sent

MEMORY_SHARE = 0.85
"""Share of the memory bandwidth that simple kernels reach (BabelStream on A100 and H100 reaches 0.85 to 0.93)."""
LAUNCH_S = 13.5e-6
"""Host time to launch a kernel with PyTorch.

Measured for a linear layer's forward pass, one kernel, on an H100 node: 13.48 microseconds
(github.com/NVIDIA/TransformerEngine, issue 2053).
"""
OPERATOR_S, _TRITON_S, _FUNCTION_S = 9.7e-6, 56.5e-6, 147.6e-6
"""Host time of an operator, of a Triton kernel, and of both passes of an autograd function of this program.

They are the largest times measured on the host of one H200 (docs/development/measurements.md).
"""
_LAUNCH_SECONDS = np.array([OPERATOR_S, _TRITON_S, _FUNCTION_S])
_FORWARD, _BACKWARD, _WEIGHTS = range(len(PHASES))


@dataclass(frozen=True)
class PhaseTime:
    """Seconds of one pass of a piece by part; ``host`` is the host time to launch it.

    ``passes`` is the time of memory-bound kernels. ``context_parallel`` leaves out ring communication that attention
    hides.
    """

    products: float = 0.0
    attention: float = 0.0
    passes: float = 0.0
    tensor_parallel: float = 0.0
    context_parallel: float = 0.0
    expert_parallel: float = 0.0
    host: float = 0.0

    @property
    def total(self) -> float:
        """Return the device time of all parts."""
        sent = self.tensor_parallel + self.context_parallel + self.expert_parallel
        return self.products + self.attention + self.passes + sent


@dataclass(frozen=True)
class PieceTime:
    """Times of a piece's passes.

    ``weights`` has the deferred weight gradients. If they are not deferred, they are in ``backward``.
    """

    forward: PhaseTime
    backward: PhaseTime
    weights: PhaseTime

    def part(self, name: str) -> float:
        """Return the sum of one part over all passes."""
        return float(sum(getattr(each, name) for each in (self.forward, self.backward, self.weights)))

    @property
    def total(self) -> float:
        """Return the device time of all passes."""
        return self.forward.total + self.backward.total + self.weights.total


def piece_time(plan: Plan, gpu: Gpu, implementation: Implementation, trace: PieceTrace) -> PieceTime:
    """Predict the time of a traced part of the model on one rank with this GPU type."""
    # Messages of a piece are between ranks of these axes, whose positions do not depend on the other axes.
    sizes = plan.parallel_sizes
    key = (
        gpu.speeds,
        sizes.tp,
        sizes.cp,
        sizes.ep,
        sizes.expert_tp,
        implementation.times,
        implementation.attention_on_hopper,
        implementation.expert_imbalance,
    )
    found = trace.prices.get(key)
    if found is None:
        links = Links(gpu, plan.parallel_sizes)
        seconds = _seconds(plan, gpu, implementation, trace)
        phases = [
            _phase(number, trace, seconds, links, implementation.expert_imbalance) for number in range(len(PHASES))
        ]
        found = trace.prices[key] = PieceTime(*phases)
    return found


def _phase(number: int, trace: PieceTrace, seconds: np.ndarray, links: Links, imbalance: float) -> PhaseTime:
    own = trace.column("phase") == number
    kind, is_expert = trace.column("kind")[own], trace.column("is_expert")[own] > 0
    priced = np.where(is_expert, imbalance, 1.0) * seconds[own]
    sent = [(each, sent_seconds(each, links)) for each in trace.sent if each.phase == number]
    of_axis = {
        name: sum(seconds for each, seconds in sent if _axis(each) == name) for name in ("tensor", "context", "expert")
    }
    is_product, is_attention = kind == GEMM, kind == ATTENTION
    attention = float(priced[is_attention].sum())
    ring = sum(seconds for each, seconds in sent if _axis(each) == "context" and each.operation == "send")
    return PhaseTime(
        products=float(priced[is_product].sum()),
        attention=attention,
        passes=float(priced[~(is_product | is_attention)].sum()),
        tensor_parallel=of_axis["tensor"],
        context_parallel=of_axis["context"] - min(ring, attention),
        expert_parallel=of_axis["expert"] * imbalance,
        host=float(np.dot(trace.launches[number], _LAUNCH_SECONDS)),
    )


def _seconds(plan: Plan, gpu: Gpu, implementation: Implementation, trace: PieceTrace) -> np.ndarray:
    """Return the time of each operation."""
    kind, itemsize = trace.column("kind"), trace.column("itemsize")
    num_bytes, flops, batch = trace.column("num_bytes"), trace.column("flops"), trace.column("batch")
    rows, inner, columns = (trace.column(name) for name in ("rows", "inner", "columns"))
    operands = np.where(batch > 1, 0.0, batch * inner * (rows + columns) * itemsize)
    moved = np.maximum(num_bytes - operands, 0.0) / (gpu.memory_bandwidth * MEMORY_SHARE)
    products = flops / _product_rates(gpu, trace) + moved
    attention = flops / _attention_rates(plan, gpu, implementation, trace)
    passes = num_bytes / (gpu.memory_bandwidth * implementation.times.pass_share)
    priced: np.ndarray = np.where(kind == GEMM, products, np.where(kind == ATTENTION, attention, passes))
    return priced


def computed_seconds(plan: Plan, gpu: Gpu, implementation: Implementation, trace: PieceTrace) -> float:
    """Return the time of the FLOPs of matmuls and attention alone, which is proportional to tokens.

    Attention takes its rate without context parallelism, even if the plan has context parallelism.
    """
    kind, flops = trace.column("kind"), trace.column("flops")
    alone = dataclasses.replace(plan, parallel_sizes=dataclasses.replace(plan.parallel_sizes, cp=1))
    attention = flops / _attention_rates(alone, gpu, implementation, trace)
    seconds = np.where(kind == GEMM, flops / _product_rates(gpu, trace), np.where(kind == ATTENTION, attention, 0.0))
    return float(seconds.sum())


def _product_rates(gpu: Gpu, trace: PieceTrace) -> np.ndarray:
    """Return the matmul FLOP/s for the element size of each operation."""
    itemsize = trace.column("itemsize")
    rates: np.ndarray = np.where(itemsize == 1, gpu.matmul_flops(1), gpu.matmul_flops(2))
    rates[itemsize < 1] = gpu.matmul_flops(0.5)
    rates[itemsize > 2] = gpu.matmul_flops(4)
    return rates


def _attention_rates(plan: Plan, gpu: Gpu, implementation: Implementation, trace: PieceTrace) -> np.ndarray:
    """Return the attention FLOP/s for the pass of each operation."""
    on_hopper = gpu.capability >= (9, 0)
    takes_cudnn = implementation.attention_on_hopper == "cudnn" and not plan.model.attention_dropout
    rates = gpu.cudnn if on_hopper and takes_cudnn else gpu.flash
    known = rates[128 if plan.model.head_width > 64 else 64]
    share = implementation.times.backward_share if on_hopper else 1.0
    ring = implementation.times.ring_share if plan.parallel_sizes.cp > 1 else 1.0
    is_forward = (trace.column("phase") == _FORWARD) | (trace.column("is_recomputed") > 0)
    of_rate: np.ndarray = np.where(is_forward, known.forward, known.backward * share) * gpu.half_flops * ring
    return of_rate


def _axis(sent: Sent) -> str:
    if sent.axes[0].startswith("cp"):
        return "context"
    if sent.axes == ("ep", "etp") or (sent.axes == ("tp",) and sent.operation == "all_to_all"):
        return "expert"
    return "tensor" if sent.axes == ("tp",) else "other"


def sent_seconds(sent: Sent, links: Links) -> float:
    """Return the time of a message of a piece; an all-reduce counts as a reduce-scatter and an all-gather."""
    rounds, axis = (2 if sent.operation == "all_reduce" else 1), _axis(sent)
    if axis == "tensor" and sent.operation == "send":
        # One of the chunks that an all-gather would carry, on its way around a ring.
        return links.tensor_parallel_seconds(sent.num_bytes * sent.group_size / max(sent.group_size - 1, 1))
    if axis == "tensor":
        return rounds * links.tensor_parallel_seconds(sent.num_bytes)
    if axis == "context":
        return links.context_seconds(sent.operation, sent.num_bytes)
    if axis == "expert" and sent.operation == "all_to_all":
        return links.expert_exchange_seconds(sent.num_bytes)
    return rounds * links.expert_gather_seconds(sent.num_bytes) if axis == "expert" else 0.0


@dataclass(frozen=True)
class LayerTime:
    """Seconds of a layer per micro-batch by part; ``again`` is the recomputation with full recompute.

    ``expert_parallel`` is the token exchange of expert parallelism. ``forward`` and ``weight_gradients`` are the
    forward pass and the deferred weight gradients; the other parts include them. ``host`` is the host time to launch
    the layer once, and ``host_again`` to launch its recomputation. ``host_forward`` is the host time of the forward
    pass, if the host waits for the device in that pass, and 0 otherwise.
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
        """Return the device time of all parts, or the host time if it is longer."""
        whole, host = self.device, self.host + self.host_again
        rest = max(host - self.host_forward, whole - self.forward)
        return max(self.host_forward, self.forward) + rest if self.host_forward else max(host, whole)

    @property
    def device(self) -> float:
        """Return the device time of all parts."""
        busy = self.products + self.attention + self.passes + self.again
        return busy + self.tensor_parallel + self.context_parallel + self.expert_parallel + self.offload

    @property
    def once(self) -> LayerTime:
        return dataclasses.replace(self, again=0.0, host_again=0.0)


def layer_time(
    plan: Plan, gpu: Gpu, implementation: Implementation, kept: PieceMemory, kind: LayerKind, number: int
) -> LayerTime:
    """Return the time of one layer, forward and backward, with the configured recompute.

    ``kept`` is the layer's memory. In the forward pass of an MoE layer the host waits for the number of tokens per
    expert.
    """
    trace = layer_trace(plan, gpu.capability, number)
    time = piece_time(plan, gpu, implementation, trace)
    if not implementation.is_traced:
        passed, launches = passed_bytes(plan, implementation, kind), num_launches(plan, implementation, kind)
        passes = passed / (gpu.memory_bandwidth * implementation.times.pass_share)
        time = _of_other_program(plan, gpu, trace, time, passes, launches * LAUNCH_S)
    elif plan.uses_cuda_graphs:
        time = _captured(time)
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
    """Return the time of the embedding, and the time of everything after the layers."""
    traces = [end_trace(plan, gpu.capability, has_loss=has_loss) for has_loss in (False, True)]
    first, last = (piece_time(plan, gpu, implementation, trace) for trace in traces)
    if plan.captures_loss and implementation.is_traced:
        first, last = _captured(first), _captured(last)
    if not implementation.is_traced:
        passes = loss_bytes(plan) / (gpu.memory_bandwidth * MEMORY_SHARE)
        kinds = layer_kinds(plan.model, plan.seq_length)[plan.model.num_layers :]
        further = sum(passed_bytes(plan, implementation, kind) for kind in kinds)
        passes += further / (gpu.memory_bandwidth * implementation.times.pass_share)
        last = _of_other_program(plan, gpu, traces[1], last, passes, host=0.0)
    return max(first.total, first.part("host")), max(last.total, last.part("host"))


def _captured(time: PieceTime) -> PieceTime:
    """Return the time of a piece as CUDA graphs: the replayed graph of a pass is one launch."""
    phases = (time.forward, time.backward, time.weights)
    return PieceTime(*(dataclasses.replace(each, host=min(each.host, OPERATOR_S)) for each in phases))


def _of_other_program(
    plan: Plan, gpu: Gpu, trace: PieceTrace, time: PieceTime, passes: float, host: float
) -> PieceTime:
    """Return the time of a piece of another program.

    Matmuls, attention and messages take the times of the trace. ``passes`` is the time of the program's memory passes,
    and ``host`` the host time of its launches. The forward pass has a third of both.
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

    With sequence parallelism, all-reduces carry only amaxes and the sums of the cross-entropy. They are not counted.
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


_UPDATE_BYTES = 30
"""Bytes that the optimizer reads and writes per parameter: gradient, main parameter, two moments, weight."""
SIMULATED_ROUNDS = 2
"""Rounds of micro-batches to simulate; each further round takes every stage the time of the slowest stage."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step by part; ``slowest_stage`` is the time of one micro-batch on the slowest stage.

    ``layer`` is an FP8 layer if the model has any. The first and last layers that are not in FP8 are counted with their
    own time. ``exposed_data_parallel`` is the exposed time of gradient reductions and parameter gathers. ``host`` is
    the host time to launch the layers of the slowest stage. It overlaps with ``busy``, which is longer if the host is
    slower than the GPU (``is_host_bound``).
    """

    layer: LayerTime
    output_layer: float
    slowest_stage: float
    busy: float
    bubble: float
    neighbors: float
    exposed_data_parallel: float
    update: float
    host: float
    is_host_bound: bool

    @property
    def total(self) -> float:
        """Return the sum of all parts that do not overlap."""
        return self.busy + self.bubble + self.neighbors + self.exposed_data_parallel + self.update


def step_time(
    plan: Plan, gpu: Gpu, implementation: Implementation, stages: Sequence[StageState], pieces: ModelPieces
) -> StepTime:
    """Return the time of a training step.

    ``stages`` is the memory of every stage between steps, and ``pieces`` the result of `model_pieces`.
    """
    kinds = layer_kinds(plan.model, plan.seq_length)
    # The last layer of a kind: after a frozen embedding the first layer computes less.
    layers = {
        kind: layer_time(plan, gpu, implementation, pieces.layers[number], kind, number)
        for kind, number in dict(zip(kinds, range(plan.model.num_layers))).items()
    }
    embedding, output = end_times(plan, gpu, implementation)
    chunks_of = [plan.stage_layout.chunks(stage) for stage in range(plan.parallel_sizes.pp)]
    seconds, own = [], []
    for chunks in chunks_of:
        own.append([each for chunk in chunks for each in _layers(plan, kinds, layers, chunk)])
        ends = sum(output * chunk.has_loss + embedding * chunk.has_embedding for chunk in chunks)
        seconds.append(sum(count * layer.total for count, layer in own[-1]) + ends)
    slowest, pp = max(seconds), len(seconds)
    of_slowest = own[seconds.index(slowest)]
    host = sum(count * (layer.host + layer.host_again) for count, layer in of_slowest)
    device = sum(count * layer.device for count, layer in of_slowest)
    num_layers = {len(layer_numbers(plan.model, chunk)) for chunks in chunks_of for chunk in chunks}
    if plan.pipeline_schedule == "zero-bubble" or (plan.pipeline_schedule == "1f1b" and len(num_layers) > 1):
        bubble = _simulated_bubble(plan, kinds, layers, seconds, output)
    else:
        bubble = (pp - 1) / plan.stage_layout.num_chunks * sum(seconds) / pp
    links = Links(gpu, plan.parallel_sizes)
    return StepTime(
        layer=layers[max((kind for kind in layers if not kind.is_further), key=attrgetter("order"))],
        output_layer=output,
        slowest_stage=slowest,
        busy=plan.num_microbatches * slowest,
        bubble=bubble,
        neighbors=neighbors_seconds(plan, gpu, implementation),
        exposed_data_parallel=max(exposed_replica_seconds(plan, links, stage, slowest) for stage in stages),
        update=update_seconds(gpu, stages),
        host=plan.num_microbatches * host,
        is_host_bound=host > device,
    )


def neighbors_seconds(plan: Plan, gpu: Gpu, implementation: Implementation) -> float:
    """Return the exposed time of pipeline communication in a step."""
    num_chunks = plan.stage_layout.num_chunks
    is_exposed = implementation.waits_for_neighbors and num_chunks == 1
    sent = Links(gpu, plan.parallel_sizes).pipeline_seconds(plan.message_bytes)
    shown = sent if is_exposed else num_chunks * exposed_seconds(gpu, sent, sent)
    return plan.num_microbatches * shown


def update_seconds(gpu: Gpu, stages: Sequence[StageState]) -> float:
    """Return the time of the optimizer's update on the stage with the most optimizer state."""
    return max(stage.optimizer for stage in stages) / 12 * _UPDATE_BYTES / (gpu.memory_bandwidth * MEMORY_SHARE)


def _simulated_bubble(
    plan: Plan,
    kinds: Sequence[LayerKind],
    layers: Mapping[LayerKind, LayerTime],
    seconds: Sequence[float],
    output: float,
) -> float:
    """Return the bubble of a step with one chunk per rank: its simulated time without the passes of the slowest stage.

    ``seconds`` are the times of one micro-batch on each stage. The output layer is assumed to take the same time in the
    forward pass, for input gradients and for weight gradients.
    """
    durations = []
    for stage, total in enumerate(seconds):
        (chunk,) = plan.stage_layout.chunks(stage)
        own = [layers[kinds[number]] for number in chunk.layer_numbers]
        at_end = output / 3 * chunk.has_loss
        forward = sum(layer.forward for layer in own) + at_end
        weight = sum(layer.weight_gradients for layer in own) + at_end * (not plan.model.lora_rank)
        inputs = max(0.0, total - forward - weight)
        durations.append(
            Durations(forward=forward, backward=inputs + weight, backward_input=inputs, backward_weight=weight)
        )
    some = min(plan.num_microbatches, SIMULATED_ROUNDS * len(seconds))
    return _makespan(plan.pipeline_schedule, some, tuple(durations)) - some * max(seconds)


# A search repeats layouts with the same durations, such as those with other context-parallel sizes.
@functools.lru_cache(maxsize=1024)
def _makespan(schedule: str, num_microbatches: int, durations: tuple[Durations, ...]) -> float:
    return simulate(build_schedule(schedule, len(durations), num_microbatches), 1, durations).makespan


def _layers(
    plan: Plan,
    kinds: Sequence[LayerKind],
    layers: Mapping[LayerKind, LayerTime],
    chunk: StageContents,
) -> Iterator[tuple[int, LayerTime]]:
    """Yield the number of layers of a chunk with each time: block recompute and offload apply to its first layers."""
    model, numbers = plan.model, chunk.layer_numbers
    _, again = recomputed_groups(model, len(numbers))
    offloaded = min(len(numbers), model.num_offloaded_layers) if model.cpu_offloading else 0
    for kind, layer in layers.items():
        places = [place for place, number in enumerate(numbers) if kinds[number] == kind]
        for (is_again, is_offloaded), count in Counter((place < again, place < offloaded) for place in places).items():
            own = layer if is_again else layer.once
            yield count, own if is_offloaded else dataclasses.replace(own, offload=0.0)
