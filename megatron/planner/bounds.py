"""The least time and memory that a layout can take, from traces of layouts that shard tensors and experts alone.

A search looks at many layouts that differ in context parallelism, schedule, recompute and micro-batch size. None of
these makes a token cheaper than it is without them, so that a few traces bound the time of all of them. A layout whose
bound is above the time of enough others is not traced itself.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.parallel_sizes import ParallelSizes
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.layer_kinds import layer_kinds
from megatron.planner.piece_memory import NOTHING, ModelPieces
from megatron.planner.piece_time import PieceTime, piece_time
from megatron.planner.pieces import end_trace, layer_trace
from megatron.planner.plan import Plan
from megatron.planner.stage_memory import StageState, stage_memory
from megatron.planner.step_time import neighbours_seconds, update_seconds
from megatron.planner.traces import FEWEST_SAMPLES, PieceMemory, PieceTrace

_KEPT_SHARE = 0.9
"""What the bound of saved activations leaves for tensors that context parallelism does not divide exactly."""


@dataclass(frozen=True)
class _Cost:
    """Hold the seconds of a piece and a micro-batch: those that context parallelism divides, and the others."""

    of_tokens: float
    of_piece: float
    forward: float
    attention_forward: float

    def seconds(self, context_ranks: int) -> float:
        """Return the least time on one of so many context-parallel ranks."""
        return self.of_tokens / context_ranks + self.of_piece


@dataclass
class Bounds:
    """Bound the time and the memory of plans of one model on a GPU type, under an implementation that is traced."""

    gpu: Gpu
    implementation: Implementation
    _bases: dict[Hashable, Plan] = field(default_factory=dict)
    _costs: dict[Hashable, _Cost] = field(default_factory=dict)

    def seconds(self, plan: Plan, states: Sequence[StageState]) -> float:
        """Return what a step of a plan takes at least; ``states`` are what its stages hold between steps."""
        sizes, model = plan.parallel_sizes, plan.model
        kinds = layer_kinds(model, plan.seq_length)
        layers = {kind: self._layer_seconds(plan, kinds.index(kind)) for kind in set(kinds[: model.num_layers])}
        ends = {has_loss: self._end_cost(plan, has_loss=has_loss).seconds(sizes.cp) for has_loss in (False, True)}
        stages = [
            sum(
                sum(layers[kinds[number]] for number in chunk.layer_numbers)
                + ends[False] * chunk.has_embedding
                + ends[True] * chunk.has_loss
                for chunk in plan.stage_layout.chunks(stage)
            )
            for stage in range(sizes.pp)
        ]
        slowest, chunks = max(stages), plan.stage_layout.num_chunks
        # A schedule that fills its bubble, and stages of unlike lengths, have a bubble that is simulated.
        is_even = len({len(chunk.layer_numbers) for s in range(sizes.pp) for chunk in plan.stage_layout.chunks(s)}) == 1
        is_known = chunks > 1 or (is_even and plan.pipeline_schedule == "1f1b")
        bubble = (sizes.pp - 1) / chunks * sum(stages) / sizes.pp if is_known else 0.0
        rest = neighbours_seconds(plan, self.gpu, self.implementation) + update_seconds(self.gpu, states)
        return plan.num_microbatches * slowest + bubble + rest

    def first_stage_bytes(self, plan: Plan, state: StageState) -> int:
        """Return what the first stage of a plan without selective recompute needs at least."""
        model = plan.model
        element = ELEMENT_BYTES[model.params_dtype]
        hidden = plan.num_rows * model.hidden_size * element
        kinds = layer_kinds(model, plan.seq_length)
        kept = {
            kind: round(_KEPT_SHARE * self._kept(plan, kinds.index(kind)) / plan.parallel_sizes.cp)
            for kind in set(kinds[: model.num_layers])
        }
        layers = [PieceMemory(kept[kind], kept[kind], kept[kind]) for kind in kinds[: model.num_layers]]
        pieces = ModelPieces(layers, NOTHING, NOTHING, round(_KEPT_SHARE * hidden), 0)
        return stage_memory(plan, 0, self.implementation, pieces, state).total

    def _layer_seconds(self, plan: Plan, number: int) -> float:
        cost, model = self._cost(plan, number), plan.model
        again = 0.0
        if model.recompute_granularity == "full":
            again = cost.forward
        elif "core_attn" in model.recomputed_modules:
            again = cost.attention_forward
        return cost.seconds(plan.parallel_sizes.cp) + again / plan.parallel_sizes.cp

    def _end_cost(self, plan: Plan, *, has_loss: bool) -> _Cost:
        return self._cost(plan, has_loss)

    def _cost(self, plan: Plan, piece: int | bool) -> _Cost:
        """Return the cost of a layer by its number, or of an end of the model by whether it has the loss."""
        base = self._base(plan)
        key = base, plan.parallel_sizes, plan.micro_batch_size, type(piece), piece
        if key not in self._costs:
            own = self._time(plan, base, piece, plan.micro_batch_size)
            few, many = (self._time(plan, base, piece, size) for size in FEWEST_SAMPLES)
            constant = max(0.0, few.total - FEWEST_SAMPLES[0] * (many.total - few.total))
            of_tokens = max(0.0, own.total - constant)
            share = of_tokens / own.total if own.total else 0.0
            forward = own.forward.total * share
            self._costs[key] = _Cost(of_tokens, own.total - of_tokens, forward, own.forward.attention)
        return self._costs[key]

    def _time(self, plan: Plan, base: Plan, piece: int | bool, size: int) -> PieceTime:
        """Return the time of the base's piece at the rates and over the links of a plan."""
        return piece_time(plan, self.gpu, self.implementation, self._trace(base, piece, size))

    def _trace(self, base: Plan, piece: int | bool, size: int) -> PieceTrace:
        sized = dataclasses.replace(base, micro_batch_size=size)
        if isinstance(piece, bool):
            return end_trace(sized, self.gpu.capability, has_loss=piece)
        return layer_trace(sized, self.gpu.capability, piece)

    def _kept(self, plan: Plan, number: int) -> int:
        return self._trace(self._base(plan), number, plan.micro_batch_size).memory.kept

    def _base(self, plan: Plan) -> Plan:
        """Return the plan of which the traces are taken: without context parallelism, schedule and recompute."""
        model, sizes = plan.model, plan.parallel_sizes
        key = sizes.tp, sizes.ep, sizes.etp, model.fp8_format
        if key not in self._bases:
            alone = dataclasses.replace(
                model,
                context_parallel_size=1,
                pipeline_schedule=None,
                recompute_granularity=None,
                recompute_method=None,
                recompute_num_layers=None,
            )
            own = ParallelSizes(tp=sizes.tp, ep=sizes.ep, etp=sizes.etp)
            self._bases[key] = dataclasses.replace(
                plan, model=alone, parallel_sizes=own, pipeline_schedule="1f1b", micro_batch_size=1
            )
        return self._bases[key]
