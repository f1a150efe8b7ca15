"""What a recorded step would take on a GPU: time by part and by kind of work, and the model FLOPs utilization."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.dry_run.dry_run import DryRun
from megatron.dry_run.gpu import Gpu
from megatron.dry_run.roofline import KERNELS_OF, PRODUCTS, communication_seconds, is_attention, operation_seconds
from megatron.dry_run.step_record import PASSES, Communication, Operation

ASSUMPTIONS = (
    "A roofline and no measurement: products by tiles and waves, attention by published rates, the rest by the bytes "
    "that it must read and write.",
    "The GPU never waits for the host, except that no kernel is shorter than 2.5 microseconds.",
    "Data-parallel communication within the passes is hidden behind them; all other communication is not.",
    "A pipeline's stages take equally long, and idle at its two ends for (stages - 1) / (chunks x micro-batches) of "
    "the passes; a schedule that fills them idles less.",
    "Machines have eight GPUs, joined by NVLink; one network port serves each GPU.",
    "Memory is that of live tensors in blocks of 512 bytes: the CUDA context, libraries' work space, NCCL's buffers "
    "and fragmentation come on top (often 2 to 4 GiB).",
)
"""What a reader must know of the figures."""
_DATA_PARALLEL_AXES = (("dp",), ("dp", "cp"))


@dataclass(frozen=True)
class Estimate:
    """Hold the predicted times of a step in seconds.

    ``by_phase`` and ``by_kind`` are of the kernels, ``by_line`` of the source lines that asked for them.
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


def kernel_count(operation: Operation) -> int:
    """Return about how many kernels an operation launches."""
    return KERNELS_OF.get(operation.name, 1)


def kind_of(operation: Operation) -> str:
    """Return ``products``, ``attention`` or ``memory``: what limits an operation."""
    if is_attention(operation):
        return "attention"
    return "products" if operation.name in PRODUCTS else "memory"


def estimate_step(run: DryRun, gpu: Gpu) -> Estimate:
    """Return the estimate of a step of one rank; the world is taken to be as fast as this rank."""
    by_phase, by_kind, by_line = (
        defaultdict[str, float](float),
        defaultdict[str, float](float),
        defaultdict[str, float](float),
    )
    for operation in run.record.operations:
        seconds = operation_seconds(operation, gpu)
        by_phase[operation.phase] += seconds
        by_kind[kind_of(operation)] += seconds
        by_line[operation.where] += seconds
    exposed = hidden = exposed_in_passes = 0.0
    for communication in run.record.communications:
        seconds = communication_seconds(communication, gpu)
        if _is_hidden(communication):
            hidden += seconds
            continue
        exposed += seconds
        exposed_in_passes += seconds if communication.phase in PASSES else 0.0
    passes = sum(by_phase[phase] for phase in PASSES) + exposed_in_passes
    bubble = passes * (run.pipeline_size - 1) / (run.num_chunks * run.num_microbatches)
    total = sum(by_phase.values()) + exposed + bubble
    peak = gpu.half_flops if run.is_half else gpu.single_flops
    return Estimate(
        seconds=total,
        mfu=run.model_flops / total / peak,
        tflops=run.model_flops / total / 1e12,
        kernel_seconds=sum(by_phase.values()),
        communication_seconds=exposed,
        hidden_communication_seconds=hidden,
        bubble_seconds=bubble,
        by_phase=dict(by_phase),
        by_kind=dict(by_kind),
        by_line=dict(by_line),
    )


def _is_hidden(communication: Communication) -> bool:
    return communication.phase in PASSES and communication.call.axes in _DATA_PARALLEL_AXES
