"""Predict whether a plan runs, and its memory and step time, for an implementation and a GPU type."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron.core.errors import choices
from megatron.planner.gpu import GPUS, Gpu
from megatron.planner.implementations import NATIVE, Implementation
from megatron.planner.memory import (
    MEMORY_PARTS,
    ModelPieces,
    StageMemory,
    StageState,
    model_pieces,
    stage_memory,
    stage_state,
)
from megatron.planner.plan import Plan, megatron_step_flops
from megatron.planner.step_time import StepTime, step_time

_FLOAT8_MULTIPLE = 16


def plan_refusals(plan: Plan, implementation: Implementation, gpu: Gpu | None) -> Sequence[str]:
    """Return one line per reason why the plan is invalid; empty if it runs."""
    return [*_shape(plan), *_batches(plan, implementation), *_features(plan, implementation, gpu)]


def _shape(plan: Plan) -> Iterator[str]:
    model, t, c = plan.model, plan.parallel_sizes.tp, plan.parallel_sizes.cp
    for name, size in (("num_attention_heads", model.num_attention_heads), ("ffn_hidden_size", model.ffn_hidden_size)):
        if size % t:
            yield f"{name} {size} is not divisible by tp {t}; {_divisors(size, t)}"
    for own in model.attention_shapes:
        groups = own.num_query_groups
        if model.num_attention_heads % groups:
            yield f"num_attention_heads {model.num_attention_heads} is not divisible by num_query_groups {groups}"
        if groups % t and t % groups:
            yield f"num_query_groups {groups} and tp {t}: one must be a multiple of the other; {_divisors(groups, t)}"
    if c > 1 and plan.seq_length % (2 * c):
        yield f"seq_length {plan.seq_length} is not divisible by 2 x cp {c}; use a multiple of {2 * c}"
    if model.sequence_parallel and plan.seq_length // c % t:
        yield f"seq_length / cp is {plan.seq_length // c}, which is not divisible by tp {t}; omit sequence_parallel"


def _batches(plan: Plan, implementation: Implementation) -> Iterator[str]:
    product = plan.micro_batch_size * plan.parallel_sizes.dp
    if plan.global_batch_size % product:
        yield (
            f"global_batch {plan.global_batch_size} is not divisible by micro_batch {plan.micro_batch_size} x dp "
            f"{plan.parallel_sizes.dp}; use a multiple of {product}"
        )
        return
    pp = plan.parallel_sizes.pp
    interleaves = plan.stage_layout.num_chunks > 1
    if interleaves and plan.num_microbatches % pp and not implementation.takes_any_microbatches:
        yield (
            f"{plan.num_microbatches} micro-batches are not divisible by pp {pp}, as {implementation.name} requires "
            f"for interleaved stages; use a global_batch that is a multiple of {product * pp}"
        )


def _features(plan: Plan, implementation: Implementation, gpu: Gpu | None) -> Iterator[str]:
    model, pp = plan.model, plan.parallel_sizes.pp
    if plan.optimizer.optimizer == "muon":
        yield "--optimizer muon is not supported by the planner; plan with adam, which stores one moment more"
    if model.qk_clip:
        yield "--qk-clip is not supported by the planner; plan without it, and add the matmuls of queries and keys"
    if model.shares_tensors and not implementation.is_traced:
        yield f"{implementation.name} has no layers that share tensors; use the implementation {NATIVE.name}"
    if model.cpu_offloading and pp > 1 and not implementation.offloads_in_pipelines:
        yield (
            f"{implementation.name} does not support activation offload in pipelines (pp {pp}); use pp 1, recompute, "
            f"or the implementation {NATIVE.name}"
        )
    is_recomputed = model.recompute_granularity is not None
    if model.cpu_offloading and is_recomputed and not implementation.offloads_beside_recompute:
        yield f"{implementation.name} does not support both offload and recomputation of activations; omit one of them"
    if plan.pipeline_schedule == "zero-bubble" and not implementation.schedules_zero_bubble:
        yield (
            f"{implementation.name} has no zero-bubble schedule; use 1f1b or interleaved, or the implementation "
            f"{NATIVE.name}"
        )
    if plan.stage_layout.num_chunks > 1 and pp == 1:
        yield "virtual stages need pp of 2 or more; omit vpp or raise pp"
    if not model.fp8.is_quantized:
        return
    in_nvfp4 = model.fp8.fp4_format is not None
    if in_nvfp4 and not implementation.is_traced:
        yield f"--fp4-format is not predicted for {implementation.name}; use the implementation {NATIVE.name}"
    if gpu is not None and (problem := lacks_format(gpu, in_nvfp4=in_nvfp4)) is not None:
        yield f"{problem}, or bf16"
    if in_nvfp4:
        return
    width = model.ffn_hidden_size // plan.parallel_sizes.tp
    for name, size in (("hidden_size", model.hidden_size), ("ffn_hidden_size / tp", width)):
        if size % _FLOAT8_MULTIPLE:
            yield f"{name} {size} is not divisible by {_FLOAT8_MULTIPLE}, as FP8 GEMMs require; use bf16"


def lacks_format(gpu: Gpu, *, in_nvfp4: bool) -> str | None:
    """Return a message if a GPU type has no FP8 or NVFP4 matmuls, with the GPU types that do, or None."""
    if gpu.float4_flops if in_nvfp4 else gpu.float8_flops:
        return None
    able = sorted(name for name, each in GPUS.items() if (each.float4_flops if in_nvfp4 else each.float8_flops))
    return f"{gpu.name} does not support {'NVFP4' if in_nvfp4 else 'FP8'} GEMMs; use one of {', '.join(able)}"


def _divisors(size: int, most: int) -> str:
    """Return the tensor-parallel sizes that would work."""
    return f"use tp {choices(each for each in range(1, max(most, 8) + 1) if size % each == 0)}"


_MIB = 2**20
_DRIVER_BYTES = 361 * _MIB
"""GPU memory that the driver never frees: an H100 of 80 GiB shows 81,559 MiB."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Used GPU memory in addition to tensors; both numbers are fitted.

    ``held_bytes`` belong to the driver, libraries and NCCL communicators. ``fragment_bytes`` is the fragmentation of
    the caching allocator with interleaved stages, whose chunks allocate and free memory in turn. The allocator frees
    these fragments before it runs out of memory, which takes time: a step close to the memory limit is slower than
    predicted.
    """

    held_bytes: int
    fragment_bytes: int


HOPPER_MACHINES = Platform(held_bytes=4326 * _MIB, fragment_bytes=2744 * _MIB)
"""Nodes of eight GPUs with NVLink, CUDA 12 and NCCL; expandable segments."""


@dataclass(frozen=True)
class Prediction:
    """Predicted outcome of a plan: ``outcome`` is ok, oom or error.

    ``reason`` explains an error or oom, and says if an ok plan is at the memory limit. ``stages`` has the memory of
    tensors alone. ``used_bytes`` is the largest used memory of a GPU, or None if it is not predicted. ``time`` is None
    if the GPU type is not known or the plan does not run.
    """

    outcome: str
    reason: str | None
    stages: tuple[StageMemory, ...] = ()
    used_bytes: int | None = None
    time: StepTime | None = None
    tflops: float | None = None

    @property
    def tensor_bytes(self) -> int | None:
        return max((stage.total for stage in self.stages), default=None)


def usable_bytes(gpu: Gpu) -> int:
    return gpu.memory_bytes - _DRIVER_BYTES


def least_used_bytes(states: Sequence[StageState], platform: Platform = HOPPER_MACHINES) -> int:
    """Return a lower bound of the largest used memory of a GPU, from the memory of the stages between steps alone."""
    return max(state.total for state in states) + platform.held_bytes


def predict(
    plan: Plan,
    implementation: Implementation,
    gpu: Gpu | None,
    usable: int | None = None,
    platform: Platform = HOPPER_MACHINES,
    states: Sequence[StageState] | None = None,
    looked_at: Sequence[int] | None = None,
    pieces: ModelPieces | None = None,
) -> Prediction:
    """Return the predicted outcome, memory and time of a plan.

    Without ``gpu`` no time is predicted. Without ``gpu`` and ``usable`` there is no memory limit. ``states`` are the
    memory of the stages between steps, if it is known from a plan of the same layout. ``looked_at`` are the stages of
    which memory is predicted, by default all. ``pieces`` is the result of `model_pieces` for this plan, if it is known.
    """
    if usable is None and gpu is not None:
        usable = usable_bytes(gpu)
    refusals = plan_refusals(plan, implementation, gpu)
    if refusals:
        return Prediction("error", "; ".join(refusals))
    pieces, pp = pieces or model_pieces(plan, implementation, gpu), plan.parallel_sizes.pp
    states = states or [stage_state(plan, stage, implementation) for stage in range(pp)]
    numbers = looked_at or range(pp)
    stages = tuple(stage_memory(plan, stage, implementation, pieces, states[stage]) for stage in numbers)
    needed = max(stage.total for stage in stages) + platform.held_bytes
    used = needed + (platform.fragment_bytes if plan.stage_layout.num_chunks > 1 else 0)
    if usable is not None and needed > usable:
        return Prediction("oom", _too_much(stages, numbers, needed, usable), stages, used)
    time = step_time(plan, gpu, implementation, states, pieces) if gpu is not None else None
    tflops = None
    if time is not None:
        tflops = megatron_step_flops(plan) / time.total / plan.parallel_sizes.world_size / 1e12
    reason = None
    if usable is not None and used > usable:
        used = usable
        reason = (
            "memory is at the limit: the allocator frees and reallocates memory, so steps are slower than predicted"
        )
    return Prediction("ok", reason, stages, used, time, tflops)


def _too_much(stages: Sequence[StageMemory], numbers: Sequence[int], needed: int, usable: int) -> str:
    number, stage = max(zip(numbers, stages), key=lambda item: item[1].total)
    largest = max(MEMORY_PARTS, key=lambda name: int(getattr(stage, name)))
    return (
        f"stage {number} needs {needed // _MIB} MiB, but the GPU has {usable // _MIB} MiB; the largest part is "
        f"{largest} ({getattr(stage, largest) // _MIB} MiB)"
    )
