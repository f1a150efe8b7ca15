"""How long a traced piece takes for a micro-batch: its operations are priced in NumPy, its messages by the links.

A GEMM takes its FLOPs at the rate that large GEMMs reach, and the writing of its result; a grouped one reads each
group's weights too. Attention takes its FLOPs at published rates. Everything else takes the bytes that it moves. The
host takes its time for each launch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np

from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.links import Links
from megatron.planner.plan import Plan
from megatron.planner.traces import ATTENTION, GEMM, PHASES, PieceTrace, Sent

MEMORY_SHARE = 0.85
"""Part of the memory's bandwidth that simple kernels reach (BabelStream on A100 and H100 reaches 0.85 to 0.93)."""
LAUNCH_S = 13.5e-6
"""The host's time for a kernel that PyTorch launches: a linear layer's forward pass, one kernel, on an H100 node (13.48
microseconds; github.com/NVIDIA/TransformerEngine, issue 2053)."""
OPERATOR_S, _TRITON_S, _FUNCTION_S = 9.7e-6, 56.5e-6, 147.6e-6
"""The host's time for an operator, a Triton kernel and both passes of an autograd function of this program: the upper
ends of what was measured on the host of one H200 (docs/measurements.md)."""
_LAUNCH_SECONDS = np.array([OPERATOR_S, _TRITON_S, _FUNCTION_S])
_FORWARD, _BACKWARD, _WEIGHTS = range(len(PHASES))


@dataclass(frozen=True)
class PhaseTime:
    """Hold the seconds of one pass of a piece by part; ``host`` is what the host takes to launch it.

    ``context_parallel`` leaves out the exchange of keys and values around a ring that attention hides.
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
        """Return all parts of the device together."""
        sent = self.tensor_parallel + self.context_parallel + self.expert_parallel
        return self.products + self.attention + self.passes + sent


@dataclass(frozen=True)
class PieceTime:
    """Hold the times of a piece's passes. ``weights`` has the deferred weight gradients; without deferral they are in
    ``backward``.
    """

    forward: PhaseTime
    backward: PhaseTime
    weights: PhaseTime

    def part(self, name: str) -> float:
        """Return one part of all passes together."""
        return float(sum(getattr(each, name) for each in (self.forward, self.backward, self.weights)))

    @property
    def total(self) -> float:
        """Return all passes together."""
        return self.forward.total + self.backward.total + self.weights.total


def piece_time(plan: Plan, gpu: Gpu, implementation: Implementation, trace: PieceTrace) -> PieceTime:
    """Return the time of a traced piece on a rank of a GPU type."""
    # Messages of a piece are between the ranks of these axes, which lie together whatever the others are.
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
    """Return the time of the FLOPs of matmuls and attention alone, which are proportional to tokens.

    The plan may shard the tokens of the trace: the time of attention is that without context parallelism.
    """
    kind, flops = trace.column("kind"), trace.column("flops")
    alone = dataclasses.replace(plan, parallel_sizes=dataclasses.replace(plan.parallel_sizes, cp=1))
    attention = flops / _attention_rates(alone, gpu, implementation, trace)
    seconds = np.where(kind == GEMM, flops / _product_rates(gpu, trace), np.where(kind == ATTENTION, attention, 0.0))
    return float(seconds.sum())


def _product_rates(gpu: Gpu, trace: PieceTrace) -> np.ndarray:
    """Return the FLOPs per second of each operation, if it is a matmul."""
    itemsize = trace.column("itemsize")
    rates: np.ndarray = np.where(itemsize == 1, gpu.matmul_flops(1), gpu.matmul_flops(2))
    rates[itemsize > 2] = gpu.matmul_flops(4)
    return rates


def _attention_rates(plan: Plan, gpu: Gpu, implementation: Implementation, trace: PieceTrace) -> np.ndarray:
    """Return the FLOPs per second of each operation, if it is one of attention."""
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
    """Return how long a message of the piece takes; an all-reduce is a reduce-scatter and a gather."""
    rounds, axis = (2 if sent.operation == "all_reduce" else 1), _axis(sent)
    if axis == "tensor" and sent.operation == "send":
        # A part of what a gather would carry, on its way round a ring.
        return links.tensor_parallel_seconds(sent.num_bytes * sent.group_size / max(sent.group_size - 1, 1))
    if axis == "tensor":
        return rounds * links.tensor_parallel_seconds(sent.num_bytes)
    if axis == "context":
        return links.context_seconds(sent.operation, sent.num_bytes)
    if axis == "expert" and sent.operation == "all_to_all":
        return links.expert_exchange_seconds(sent.num_bytes)
    return rounds * links.expert_gather_seconds(sent.num_bytes) if axis == "expert" else 0.0
