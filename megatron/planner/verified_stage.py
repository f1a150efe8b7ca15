"""Compare the plan of a stage with a dry run of its first rank: parameters, memory and messages."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.config import RunConfig
from megatron.planner.communication import step_traffic
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import NATIVE
from megatron.planner.memory import MEMORY_PARTS, StageMemory, model_pieces, stage_memory
from megatron.planner.plan import Plan
from megatron.verification import Traffic, Volume

if TYPE_CHECKING:
    from megatron.planner.simulation import StepRecord
    from megatron.training import ForwardStep, ModelProvider

CLOSE = 0.02
"""Largest allowed relative difference between the peak memory of the plan and of the dry run."""
_BLOCKS = 8 * 2**20
"""Allowed difference in bytes: rounding to allocator blocks matters in the smallest models."""
_ROUNDS = 2
"""Rounds of micro-batches after which the number in flight no longer grows."""
_MIB = 2**20


@dataclass(frozen=True)
class VerifiedStage:
    """Plan and dry run of a rank; ``planned`` is of the full step, the dry run of its first micro-batches.

    ``unlike`` has the communications whose number or bytes differ, by operation and axes: planned, and recorded.
    """

    stage: int
    rank: int
    num_microbatches: int
    num_run: int
    planned: StageMemory
    parameters: int
    peak_bytes: int
    holders: dict[str, int]
    num_communications: int
    unlike: tuple[tuple[str, Volume, Volume], ...]

    @property
    def memory_error(self) -> float:
        """Return the relative error of the planned peak memory."""
        return self.planned.total / self.peak_bytes - 1.0

    @property
    def agrees(self) -> bool:
        """Return whether plan and dry run agree on parameters, memory and communication."""
        is_close = abs(self.planned.total - self.peak_bytes) <= max(_BLOCKS, CLOSE * self.peak_bytes)
        return self.parameters == self.planned.parameters and is_close and not self.unlike

    def lines(self) -> Iterator[str]:
        """Yield a report of the comparison, with each difference."""
        some = "" if self.num_run == self.num_microbatches else f" of {self.num_microbatches}"
        yield (
            f"stage {self.stage} (rank {self.rank}, {self.num_run}{some} micro-batches): "
            f"{'as planned' if self.agrees else 'NOT as planned'}"
        )
        same = "" if self.parameters == self.planned.parameters else f", but {self.planned.parameters} were planned"
        yield f"  {self.parameters} parameters{same}"
        parts = ", ".join(
            f"{name} {self.holders.get(name, 0) // _MIB} ({getattr(self.planned, name) // _MIB})"
            for name in MEMORY_PARTS
        )
        yield (
            f"  peak {self.peak_bytes // _MIB} MiB, planned {self.planned.total // _MIB} "
            f"({100 * self.memory_error:+.2f} %); at the peak, planned in brackets: {parts}"
        )
        if not self.unlike:
            yield f"  {self.num_communications} communications, number and bytes as planned"
        for name, planned, seen in self.unlike:
            yield (
                f"  {name}: {seen.num_calls} times, {seen.num_bytes} bytes; planned {planned.num_calls} times, "
                f"{planned.num_bytes} bytes"
            )

    def to_json(self) -> dict[str, Any]:
        """Return everything as JSON-ready values; memory is in bytes."""
        return dataclasses.asdict(self) | {"agrees": self.agrees, "memory_error": self.memory_error}


def stages_to_verify(config: RunConfig, gpu: Gpu) -> list[int]:
    """Return the first stage, the last stage, and the stage with the most memory."""
    plan, pp = Plan.of(config), config.parallel_sizes.pp
    pieces = model_pieces(plan, NATIVE, gpu)
    fullest = max(range(pp), key=lambda stage: stage_memory(plan, stage, NATIVE, pieces).total)
    return sorted({0, fullest, pp - 1})


def verify_stage(
    config: RunConfig, stage: int, gpu: Gpu, model_provider: ModelProvider, forward_step: ForwardStep
) -> VerifiedStage:
    """Compare the plan of a stage with a simulated step of its first rank.

    Only the first micro-batches are run; later ones repeat the schedule.
    """
    from megatron.planner.simulation.dry_run import dry_run

    sizes, plan = config.parallel_sizes, Plan.of(config)
    rank = stage * (sizes.world_size // sizes.pp)
    shorter = _with_fewer_microbatches(config)
    record = dry_run(shorter, rank, gpu, model_provider, forward_step, num_steps=_num_steps(config))
    planned, seen = step_traffic(shorter, rank, gpu.capability), _traffic(record.record)
    unlike = [
        (f"{key[0]} over {'-'.join(key[1])}", planned.get(key, Volume(0, 0)), seen.get(key, Volume(0, 0)))
        for key in sorted({*planned, *seen})
        if planned.get(key) != seen.get(key)
    ]
    return VerifiedStage(
        stage=stage,
        rank=rank,
        num_microbatches=plan.num_microbatches,
        num_run=record.num_microbatches,
        planned=stage_memory(plan, stage, NATIVE, model_pieces(plan, NATIVE, gpu)),
        parameters=record.num_parameters,
        peak_bytes=record.record.peak_bytes,
        holders=dict(record.record.peak_holders),
        num_communications=sum(volume.num_calls for volume in seen.values()),
        unlike=tuple(unlike),
    )


def _with_fewer_microbatches(config: RunConfig) -> RunConfig:
    """Return the configuration with only as many micro-batches as fill the pipeline and drain it."""
    plan = Plan.of(config)
    round_size = max(config.model.microbatch_group_size_per_virtual_pipeline_stage or 0, plan.parallel_sizes.pp)
    few = min(plan.num_microbatches, _ROUNDS * round_size + plan.num_microbatches % round_size)
    batch = few * plan.micro_batch_size * plan.parallel_sizes.dp
    training = dataclasses.replace(
        config.training,
        global_batch_size=batch,
        rampup_batch_size=(),
        step_batch_size_schedule=None,
        batch_size_steps=(),
    )
    return dataclasses.replace(config, training=training)


def _num_steps(config: RunConfig) -> int:
    """Return the number of steps until all further steps are equal: delayed scaling needs scales of an earlier step."""
    is_delayed = config.model.fp8.fp8_format is not None and config.model.fp8.fp8_recipe == "delayed"
    return 2 if is_delayed else 1


def _traffic(record: StepRecord) -> Traffic:
    """Return the recorded traffic that this rank sends; a receive is counted on the sending rank."""
    seen: Traffic = {}
    for each in record.communications:
        if each.call.operation == "receive":
            continue
        key = each.call.operation, each.call.axes
        seen[key] = seen.get(key, Volume(0, 0)) + Volume(1, each.call.num_bytes)
    return seen
