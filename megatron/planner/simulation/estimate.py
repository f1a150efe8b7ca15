"""Estimated time of a recorded step on a GPU by part and by kind of work, and the model FLOPs utilization (MFU)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megatron.planner import Gpu
from megatron.planner.simulation.dry_run import DryRun
from megatron.planner.simulation.recorder import HOST_DIRECTIONS, PASSES, HostCopy, Operation, StepRecord, Transfer
from megatron.planner.simulation.roofline import KERNELS_OF, is_attention, operation_seconds, transfer_seconds

ASSUMPTIONS = (
    "A roofline model, not a measurement: GEMMs are modeled with tiles and waves, attention with published rates, "
    "and everything else with the bytes that it reads and writes.",
    "The GPU never waits for the host, except that no kernel is shorter than 2.5 microseconds.",
    "Communication is hidden behind the kernels that are launched between its start and the wait for it, and slows "
    "none of them. Links carry one message at a time in each direction; a rank never waits for data from a slower "
    "rank.",
    "Chunks that travel during a GEMM (--tp-comm-overlap) are transferred by copy engines, as with symmetric "
    "memory: NCCL's sends and receives, which are used if there is no symmetric memory, would occupy a few SMs.",
    "A pipeline's step takes as long as its first or its last stage, whichever is slower, with idle time of "
    "(stages - 1) / (chunks x micro-batches) of its passes; a schedule that fills that idles less.",
    "Copies to and from host memory use PCIe, with its full bandwidth in each direction for each GPU. They overlap "
    "with compute and are counted like communication; the host's own computation takes no time.",
    "Functions that --compile compiles are modeled as they run without it.",
    "Nodes have eight GPUs, connected by NVLink, and one network port per GPU.",
    "Memory counts live tensors in blocks of 512 bytes: the CUDA context, libraries' work space, NCCL's buffers and "
    "fragmentation come on top (often 2 to 4 GiB).",
)
"""Assumptions that every report lists."""
_DIRECTIONS = ("out", "in")


@dataclass(frozen=True)
class Estimate:
    """Predicted times of a step in seconds.

    ``by_phase`` and ``by_kind`` are kernel times, ``by_line`` the kernel times by source line. ``copies_hidden`` is the
    time of each copy between device and host that overlaps with kernels, in the order of the record.
    """

    seconds: float
    mfu: float
    tflops: float
    kernel_seconds: float
    communication_seconds: float
    hidden_communication_seconds: float
    bubble_seconds: float
    by_phase: Mapping[str, float]
    by_kind: Mapping[str, float]
    by_line: Mapping[str, float]
    copies_hidden: Sequence[float]


@dataclass(frozen=True)
class EstimatedRun:
    run: DryRun
    estimate: Estimate


def slowest_of(runs: Sequence[EstimatedRun]) -> EstimatedRun:
    """Return the dry run with the longest step, which is the step time of all ranks."""
    return max(runs, key=lambda each: each.estimate.seconds)


def kernel_count(operation: Operation) -> int:
    return KERNELS_OF.get(operation.name, 1)


def kind_of(operation: Operation) -> str:
    """Return the limit of an operation: ``products`` (matmul FLOPs), ``attention`` or ``memory``."""
    if is_attention(operation):
        return "attention"
    return "products" if operation.flops else "memory"


def estimate_step(run: DryRun, gpu: Gpu) -> Estimate:
    """Return the estimate of a step of one rank, as if all stages took the same time."""
    by_phase, by_kind, by_line = (
        defaultdict[str, float](float),
        defaultdict[str, float](float),
        defaultdict[str, float](float),
    )
    durations = [operation_seconds(operation, gpu) for operation in run.record.operations]
    for operation, seconds in zip(run.record.operations, durations):
        by_phase[operation.phase] += seconds
        by_kind[kind_of(operation)] += seconds
        by_line[operation.where] += seconds
    stalls, stalls_for = _stalls(run.record, durations, gpu)
    copies = [transfer_seconds(copy, gpu) for copy in run.record.host_copies]
    exposed = sum(stalls.values())
    everything = sum(copies) + sum(transfer_seconds(each, gpu) for each in run.record.communications)
    passes = sum(by_phase[phase] + stalls[phase] for phase in PASSES)
    bubble = passes * (run.pipeline_size - 1) / (run.num_chunks * run.num_microbatches)
    total = sum(by_phase.values()) + exposed + bubble
    peak = gpu.half_flops if run.is_half else gpu.single_flops
    return Estimate(
        seconds=total,
        mfu=run.model_flops / total / peak,
        tflops=run.model_flops / total / 1e12,
        kernel_seconds=sum(by_phase.values()),
        communication_seconds=exposed,
        hidden_communication_seconds=max(0.0, everything - exposed),
        bubble_seconds=bubble,
        by_phase=dict(by_phase),
        by_kind=dict(by_kind),
        by_line=dict(by_line),
        copies_hidden=[
            max(0.0, seconds - stalls_for[id(copy)]) for copy, seconds in zip(run.record.host_copies, copies)
        ],
    )


def _stalls(
    record: StepRecord, durations: Sequence[float], gpu: Gpu
) -> tuple[Mapping[str, float], Mapping[int, float]]:
    """Return how long kernels wait for transfers: by phase, and by transfer."""
    stalls, stalls_for, left = _move(record, durations, gpu, ())
    if left and len(left) == record.num_carried:
        # Steps repeat: transfers in flight at the start of a step have the same time left as those at its end.
        stalls, stalls_for, _ = _move(record, durations, gpu, left)
    return stalls, stalls_for


def _move(
    record: StepRecord, durations: Sequence[float], gpu: Gpu, carried: Sequence[float]
) -> tuple[Mapping[str, float], Mapping[int, float], Sequence[float]]:
    """Return the results of `_stalls`, and the time left of the transfers in flight at the end.

    ``carried`` has the time left of the transfers that are in flight at the start. All other transfers begin in this
    step.
    """
    stalls, stalls_for = defaultdict[str, float](float), defaultdict[int, float](float)
    ends: dict[int, float] = {}
    idle_from = dict.fromkeys((*_DIRECTIONS, *HOST_DIRECTIONS), 0.0)
    now, num_done = 0.0, 0
    for number, event in enumerate(record.link_events):
        now += sum(durations[num_done : event.num_operations])
        num_done = event.num_operations
        if event.is_wait:
            stall = max(0.0, ends.pop(id(event.transfer)) - now)
            stalls[event.phase] += stall
            stalls_for[id(event.transfer)] += stall
            now += stall
            continue
        directions = _directions(event.transfer)
        if number < len(carried):
            end = carried[number]
        else:
            end = max(now, *(idle_from[direction] for direction in directions))
            end += transfer_seconds(event.transfer, gpu)
        ends[id(event.transfer)] = end
        idle_from |= dict.fromkeys(directions, end)
    now += sum(durations[num_done:])
    return stalls, stalls_for, [max(0.0, end - now) for end in ends.values()]


def _directions(transfer: Transfer) -> Sequence[str]:
    """Return the link directions that a transfer uses: a collective uses both, a copy uses one direction of PCIe."""
    if isinstance(transfer, HostCopy):
        return (transfer.direction,)
    return {"send": _DIRECTIONS[:1], "receive": _DIRECTIONS[1:]}.get(transfer.call.operation, _DIRECTIONS)
