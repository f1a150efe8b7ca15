"""Whether a plan runs, in which memory and in which time, under the implementation that runs it on a GPU type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.piece_memory import ModelPieces
from megatron.planner.pieces import model_pieces
from megatron.planner.plan import Plan
from megatron.planner.refusals import plan_refusals
from megatron.planner.stage_memory import (
    MEMORY_PARTS,
    StageMemory,
    StageState,
    stage_memory,
    stage_state,
)
from megatron.planner.step_flops import megatron_step_flops
from megatron.planner.step_time import StepTime, step_time

_MIB = 2**20
_DRIVER_BYTES = 361 * _MIB
"""What of the memory of a GPU is never free: an H100 of 80 GiB shows 81,559 MiB."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """Hold what GPUs show as used beside tensors: both numbers are fitted.

    ``held_bytes`` are the driver's, the libraries' and the communicators'. ``fragment_bytes`` the allocator keeps in
    pieces where chunks of a model come and go (interleaved stages). It gives them back before it fails, and takes its
    time: a step in too little memory is slower than predicted.
    """

    held_bytes: int
    fragment_bytes: int


HOPPER_MACHINES = Platform(held_bytes=4326 * _MIB, fragment_bytes=2744 * _MIB)
"""Machines of eight GPUs with NVLink, CUDA 12 and NCCL; expandable segments."""


@dataclass(frozen=True)
class Prediction:
    """Hold what is predicted of a plan: ``outcome`` is ok, oom or error, and ``reason`` says why it is not ok.

    ``stages`` are tensors alone. ``used_bytes`` is the most that a GPU shows as used, None without figures of it.
    ``time`` is None where the GPU type is not known or the plan does not run.
    """

    outcome: str
    reason: str | None
    stages: tuple[StageMemory, ...] = ()
    used_bytes: int | None = None
    time: StepTime | None = None
    tflops: float | None = None

    @property
    def tensor_bytes(self) -> int | None:
        """Return the tensors of the fullest stage."""
        return max((stage.total for stage in self.stages), default=None)


def usable_bytes(gpu: Gpu) -> int:
    """Return the memory of a GPU type that its driver gives away."""
    return gpu.memory_bytes - _DRIVER_BYTES


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
    """Return what becomes of a plan; without a GPU type there is no time, without ``usable`` memory no limit.

    ``states`` are what the stages of a plan of the same layout hold between steps, where that is known already.
    ``looked_at`` are the stages that can be the fullest, where not all of them are wanted. ``pieces`` is what
    `model_pieces` returned for this plan, where it was asked already.
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
        reason = "memory is at the limit: the allocator frees and asks again, and steps are slower than predicted"
    return Prediction("ok", reason, stages, used, time, tflops)


def _too_much(stages: Sequence[StageMemory], numbers: Sequence[int], needed: int, usable: int) -> str:
    number, stage = max(zip(numbers, stages), key=lambda item: item[1].total)
    largest = max(MEMORY_PARTS, key=lambda name: int(getattr(stage, name)))
    return (
        f"stage {number} needs {needed // _MIB} MiB of {usable // _MIB}; most of it is {largest} "
        f"({getattr(stage, largest) // _MIB} MiB)"
    )
