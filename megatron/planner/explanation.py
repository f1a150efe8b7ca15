"""What a configuration does, needs and costs: where each rank stands, what it holds, sends and computes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from megatron.config.run_config import RunConfig
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.pipeline_parallel.schedules import StagePlace, build_schedule, with_deferred_grads
from megatron.core.pipeline_parallel.simulator import Durations, simulate
from megatron.core.pipeline_parallel.timeline import Timeline
from megatron.planner.data_need import DataNeed, data_need
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.plan import Plan
from megatron.planner.prediction import Prediction, predict, usable_bytes
from megatron.planner.step_flops import step_flops
from megatron.planner.step_traffic import step_traffic
from megatron.training.theoretical_memory_usage import ModelSize, model_size

if TYPE_CHECKING:
    from megatron.planner.changes import Change

_DRAWN_ROUNDS = 4
"""Rounds of a schedule that are simulated: later ones repeat them."""


@dataclass(frozen=True)
class GroupTraffic:
    """Hold what a rank sends over one of its groups in a step; bytes are those of the whole tensors."""

    operation: str
    axes: tuple[str, ...]
    calls: int
    num_bytes: int


@dataclass(frozen=True)
class Explanation:
    """Hold all that is known of a configuration before it runs.

    ``timeline`` is the schedule with a micro-batch's modelled times, of its first rounds; ``bubble`` is of all.
    ``traffic`` has the first rank of each pipeline stage. ``flops`` are of a step over all ranks, what is computed
    again left out.
    """

    config: RunConfig
    plan: Plan
    gpu: Gpu
    implementation: Implementation
    notes: tuple[str, ...]
    size: ModelSize
    prediction: Prediction
    timeline: Timeline
    bubble: float
    traffic: tuple[tuple[GroupTraffic, ...], ...]
    flops: float
    data: DataNeed

    @property
    def sizes(self) -> ParallelSizes:
        """Return the grid of ranks."""
        return self.plan.parallel_sizes

    @property
    def usable(self) -> int:
        """Return the bytes of memory that the GPU gives away."""
        return usable_bytes(self.gpu)

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens of all ranks in a second, None where no time is known."""
        time = self.prediction.time
        return None if time is None else self.plan.global_batch_size * self.plan.seq_length / time.total

    def to_json(self, changes: Sequence[Change] = ()) -> dict[str, Any]:
        """Return everything as JSON-ready values, with changes that would make it run.

        Memory is in bytes, time in seconds.
        """
        plan, prediction = self.plan, self.prediction
        return {
            "world_size": self.sizes.world_size,
            "parallel_sizes": dict(self.sizes.grid),
            "ranks": [
                {**self.sizes.place(rank), **self.sizes.expert_place(rank)} for rank in range(self.sizes.world_size)
            ],
            "stages": [
                {
                    "stage": stage,
                    "chunks": [dataclasses.asdict(chunk) for chunk in plan.stage_layout.chunks(stage)],
                    "parameters": self.size.shards[stage],
                    "trained_parameters": self.size.trained[stage],
                    "memory": dataclasses.asdict(prediction.stages[stage]) if prediction.stages else None,
                    "traffic": [dataclasses.asdict(each) for each in self.traffic[stage]],
                }
                for stage in range(self.sizes.pp)
            ],
            "parameters": self.size.block + self.size.embedding,
            "vocab_size": plan.model.vocab_size,
            "padded_vocab_size": plan.model.padded_vocab_size,
            "micro_batch_size": plan.micro_batch_size,
            "global_batch_size": plan.global_batch_size,
            "num_microbatches": plan.num_microbatches,
            "tokens_per_step": plan.global_batch_size * plan.seq_length,
            "data": dataclasses.asdict(self.data),
            "pipeline_schedule": plan.pipeline_schedule,
            "bubble": self.bubble,
            "flops_per_step": self.flops,
            "flops_per_step_and_gpu": self.flops / self.sizes.world_size,
            "gpu": self.gpu.name,
            "implementation": self.implementation.name,
            "expert_imbalance": self.implementation.expert_imbalance,
            "outcome": prediction.outcome,
            "reason": prediction.reason,
            "used_bytes": prediction.used_bytes,
            "usable_bytes": self.usable,
            "time": None if prediction.time is None else dataclasses.asdict(prediction.time),
            "seconds_per_step": None if prediction.time is None else prediction.time.total,
            "tokens_per_second": self.tokens_per_second,
            "tflops_per_gpu": prediction.tflops,
            "notes": list(self.notes),
            "changes": [dataclasses.asdict(change) for change in changes],
        }


def explain(config: RunConfig, notes: Sequence[str], gpu: Gpu, implementation: Implementation) -> Explanation:
    """Return what a resolved configuration, whose vocabulary is known, does on ranks of a GPU type."""
    plan = Plan.of(config)
    prediction = predict(plan, implementation, gpu)
    timeline, bubble = _pipeline(config, plan, prediction)
    return Explanation(
        config=config,
        plan=plan,
        gpu=gpu,
        implementation=implementation,
        notes=tuple(notes),
        size=model_size(config),
        prediction=prediction,
        timeline=timeline,
        bubble=bubble,
        traffic=tuple(_traffic(config, gpu, stage) for stage in range(plan.parallel_sizes.pp)),
        flops=step_flops(plan),
        data=data_need(config),
    )


def first_rank(sizes: ParallelSizes, stage: int) -> int:
    """Return the first rank of a pipeline stage."""
    return stage * (sizes.world_size // sizes.pp)


def _traffic(config: RunConfig, gpu: Gpu, stage: int) -> tuple[GroupTraffic, ...]:
    traffic = step_traffic(config, first_rank(config.parallel_sizes, stage), gpu.capability)
    return tuple(
        GroupTraffic(operation, axes, volume.num_calls, volume.num_bytes)
        for (operation, axes), volume in sorted(traffic.items(), key=lambda item: -item[1].num_bytes)
    )


def _pipeline(config: RunConfig, plan: Plan, prediction: Prediction) -> tuple[Timeline, float]:
    """Return the first rounds of the schedule as training runs it, and the share of idle time beside all micro-batches.

    A round more takes every rank as long as its passes.
    """
    model, sizes, chunks = plan.model, plan.parallel_sizes, plan.stage_layout.num_chunks
    total, group = plan.num_microbatches, model.microbatch_group_size_per_virtual_pipeline_stage
    round_size = max(group or 0, sizes.pp)
    drawn = total if total <= _DRAWN_ROUNDS * round_size else _DRAWN_ROUNDS * round_size + total % round_size
    pass_time = 1.0 if prediction.time is None else prediction.time.slowest_stage / chunks / 3.0
    durations = Durations(
        forward=pass_time,
        backward=2 * pass_time,
        backward_input=pass_time,
        backward_weight=pass_time,
        output_weight=pass_time / 2,
    )
    schedule = [
        with_deferred_grads(
            actions,
            StagePlace(sizes.pp, rank, chunks),
            delays=model.delay_wgrad_compute,
            defers=model.defer_embedding_wgrad_compute,
            max_microbatches=model.wgrad_deferral_limit,
        )
        for rank, actions in enumerate(build_schedule(plan.pipeline_schedule, sizes.pp, drawn, chunks, group))
    ]
    timeline = simulate(schedule, chunks, durations)
    busy = 3 * pass_time * chunks
    return timeline, max(0.0, timeline.makespan - drawn * busy) / (total * busy)
