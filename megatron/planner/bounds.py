"""Lower bounds of the step time and memory of a layout, from traces with tensor and expert parallelism alone.

A search compares many layouts that differ in context parallelism, schedule, recompute and micro-batch size. None of
these makes a token cheaper, so a few traces bound the time of all of them. A layout is not traced itself if its bound
is above the time of enough other layouts.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from megatron.core.parallel_config import ELEMENT_BYTES, ParallelSizes
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation
from megatron.planner.memory import NOTHING, ModelPieces, StageState, end_trace, layer_trace, stage_memory
from megatron.planner.plan import Plan, layer_kinds, layer_numbers
from megatron.planner.step_time import (
    SIMULATED_ROUNDS,
    PieceTime,
    computed_seconds,
    neighbors_seconds,
    piece_time,
    update_seconds,
)
from megatron.planner.traces import FEWEST_SAMPLES, PieceMemory, PieceTrace

_ROUNDING = 1e-9
"""Relative margin of each time bound, since the bound and the time are summed in different orders."""
_KEPT_SHARE = 0.9
"""Share of the saved activations that the bound counts: context parallelism does not divide every tensor exactly."""


@dataclass(frozen=True)
class _Cost:
    """Seconds of a piece per micro-batch: ``of_tokens`` is divided by context parallelism, ``of_piece`` is not.

    ``forward`` and ``attention_forward`` are the times that recompute adds. ``forward_of_tokens`` is a lower bound of
    the time of a forward pass.
    """

    of_tokens: float
    of_piece: float
    forward: float
    attention_forward: float
    forward_of_tokens: float

    def seconds(self, context_ranks: int) -> float:
        return self.of_tokens / context_ranks + self.of_piece


@dataclass
class Bounds:
    """Lower bounds of the time of plans of one model on a GPU type, and of their memory for traced implementations."""

    gpu: Gpu
    implementation: Implementation
    _traces: dict[Hashable, PieceTrace] = field(default_factory=dict)
    _costs: dict[Hashable, _Cost] = field(default_factory=dict)

    def seconds(self, plan: Plan, states: Sequence[StageState], enough: float = math.inf) -> float:
        """Return a lower bound of the plan's step time. ``states`` is the memory of its stages between steps.

        The result may be less tight if it is above ``enough``. For implementations that are not traced, the bound
        leaves out memory-bound kernels.
        """
        if not self.implementation.is_traced:
            return self._seconds(plan, states, is_loose=True)
        if (plan.micro_batch_size > 1 or plan.parallel_sizes.cp > 1) and enough < math.inf:
            # The trace of one sample per micro-batch exists already, and matmul and attention time is proportional to
            # samples.
            loose = self._seconds(plan, states, is_loose=True)
            if loose > enough:
                return loose
        return self._seconds(plan, states, is_loose=False)

    def _seconds(self, plan: Plan, states: Sequence[StageState], *, is_loose: bool) -> float:
        sizes, model = plan.parallel_sizes, plan.model
        kinds = layer_kinds(model, plan.seq_length)
        layers = {
            kind: self._layer_seconds(plan, kinds.index(kind), is_loose=is_loose)
            for kind in set(kinds[: model.num_layers])
        }
        ends = {has_loss: self._cost(plan, has_loss, is_loose=is_loose).seconds(sizes.cp) for has_loss in (False, True)}
        stages = [
            sum(
                sum(layers[kinds[number]] for number in chunk.layer_numbers)
                + ends[False] * chunk.has_embedding
                + ends[True] * chunk.has_loss
                for chunk in plan.stage_layout.chunks(stage)
            )
            for stage in range(sizes.pp)
        ]
        slowest, num_chunks = max(stages), plan.stage_layout.num_chunks
        # The bubble is simulated for zero-bubble schedules and for stages with different numbers of layers.
        of_stages = (plan.stage_layout.chunks(stage) for stage in range(sizes.pp))
        is_even = len({len(layer_numbers(model, chunk)) for chunks in of_stages for chunk in chunks}) == 1
        if num_chunks > 1 or (is_even and plan.pipeline_schedule == "1f1b"):
            bubble = (sizes.pp - 1) / num_chunks * sum(stages) / sizes.pp
        else:
            bubble = self._simulated_bubble(plan, stages, is_loose=is_loose)
        rest = neighbors_seconds(plan, self.gpu, self.implementation) + update_seconds(self.gpu, states)
        return (1.0 - _ROUNDING) * (plan.num_microbatches * slowest + bubble + rest)

    def first_stage_bytes(self, plan: Plan, state: StageState) -> int:
        """Return a lower bound of the first stage's memory."""
        model = plan.model
        hidden = plan.num_rows * model.hidden_size * ELEMENT_BYTES[model.params_dtype]
        kinds = layer_kinds(model, plan.seq_length)
        kept = {
            kind: round(_KEPT_SHARE * self._kept(plan, kinds.index(kind)) / plan.parallel_sizes.cp)
            for kind in set(kinds[: model.num_layers])
        }
        layers = [PieceMemory(kept[kind], kept[kind], kept[kind]) for kind in kinds[: model.num_layers]]
        pieces = ModelPieces(layers, NOTHING, NOTHING, round(_KEPT_SHARE * hidden), 0)
        return stage_memory(plan, 0, self.implementation, pieces, state).total

    def _simulated_bubble(self, plan: Plan, stages: Sequence[float], *, is_loose: bool) -> float:
        """Return a lower bound of the bubble with one chunk per rank; ``stages`` are seconds per micro-batch.

        A stage waits for the forward passes of the stages before it. In 1F1B it also waits for their backward passes,
        which follow its last one.
        """
        model, kinds = plan.model, layer_kinds(plan.model, plan.seq_length)
        some = min(plan.num_microbatches, SIMULATED_ROUNDS * len(stages))
        slowest, outside, bubble = max(stages), 0.0, 0.0
        for stage, seconds in enumerate(stages):
            bubble = max(bubble, outside - some * (slowest - seconds))
            if plan.pipeline_schedule == "1f1b":
                outside += seconds
            else:
                costs = (
                    self._cost(plan, kinds.index(kinds[number]), is_loose=is_loose)
                    for chunk in plan.stage_layout.chunks(stage)
                    for number in chunk.layer_numbers
                )
                outside += sum(cost.forward_of_tokens for cost in costs) / model.context_parallel_size
        return bubble

    def selective_bytes(self, plan: Plan, state: StageState, whole: ModelPieces) -> int:
        """Return a lower bound of the first stage's memory with selective recompute.

        ``whole`` is the memory of the plan's pieces without recompute.
        """
        model, size = plan.model, plan.micro_batch_size
        kinds, layers = layer_kinds(model, plan.seq_length), []
        for kind, layer in zip(kinds, whole.layers):
            number = kinds.index(kind)
            freed = self._trace(plan, number, size).memory.kept - self._kept(plan, number)
            less = round(max(0, freed) / _KEPT_SHARE / plan.parallel_sizes.cp)
            layers.append(
                dataclasses.replace(
                    layer,
                    kept=max(0, layer.kept - less),
                    forward_peak=max(0, layer.forward_peak - less),
                    backward_peak=max(0, layer.backward_peak - less),
                )
            )
        pieces = dataclasses.replace(whole, layers=layers)
        return stage_memory(plan, 0, self.implementation, pieces, state).total

    def _layer_seconds(self, plan: Plan, number: int, *, is_loose: bool) -> float:
        cost, model = self._cost(plan, number, is_loose=is_loose), plan.model
        again = 0.0
        if model.recompute_granularity == "full":
            again = cost.forward
        elif "core_attn" in model.recomputed_modules:
            again = cost.attention_forward
        return cost.seconds(plan.parallel_sizes.cp) + again / plan.parallel_sizes.cp

    def _cost(self, plan: Plan, piece: int | bool, *, is_loose: bool) -> _Cost:
        """Return the cost of a layer or of an end of the model.

        ``piece`` is the number of a layer, or says whether an end is the loss. A loose cost is scaled up from one
        sample per micro-batch and counts matmuls and attention alone.
        """
        size = plan.micro_batch_size
        key = _shared(plan), plan.parallel_sizes.cp, size, type(piece), piece, is_loose
        if key not in self._costs and is_loose:
            trace = self._trace(plan, piece, 1)
            self._costs[key] = _Cost(
                of_tokens=size * computed_seconds(plan, self.gpu, self.implementation, trace),
                of_piece=0.0,
                forward=0.0,
                attention_forward=0.0,
                forward_of_tokens=0.0,
            )
        elif key not in self._costs:
            time = self._time(plan, piece, size)
            of_tokens = time.total
            if plan.parallel_sizes.cp > 1:
                few, many = (self._time(plan, piece, each).total for each in FEWEST_SAMPLES)
                constant = max(0.0, few - FEWEST_SAMPLES[0] * (many - few))
                of_tokens = max(0.0, of_tokens - constant)
            share = of_tokens / time.total if time.total else 0.0
            rest = time.total - of_tokens
            self._costs[key] = _Cost(
                of_tokens=of_tokens,
                of_piece=rest,
                forward=time.forward.total * share,
                attention_forward=time.forward.attention,
                forward_of_tokens=max(0.0, time.forward.total - rest),
            )
        return self._costs[key]

    def _time(self, plan: Plan, piece: int | bool, size: int) -> PieceTime:
        return piece_time(plan, self.gpu, self.implementation, self._trace(plan, piece, size))

    def _kept(self, plan: Plan, number: int) -> int:
        """Return a lower bound of a layer's saved activations, with the plan's selective recompute.

        It is without context parallelism, and scaled up from one sample per micro-batch, which saves the least per
        sample since it makes no transposed copies.
        """
        is_selective = plan.model.recompute_granularity == "selective"
        return plan.micro_batch_size * self._trace(plan, number, 1, is_selective=is_selective).memory.kept

    def _trace(self, plan: Plan, piece: int | bool, size: int, *, is_selective: bool = False) -> PieceTrace:
        """Return the trace of a piece of the plan that `_base` returns, for a micro-batch size."""
        key = _shared(plan), size, type(piece), piece, is_selective
        if key not in self._traces:
            sized = dataclasses.replace(_base(plan, is_selective=is_selective), micro_batch_size=size)
            if isinstance(piece, bool):
                self._traces[key] = end_trace(sized, self.gpu.capability, has_loss=piece)
            else:
                self._traces[key] = layer_trace(sized, self.gpu.capability, piece)
        return self._traces[key]


def _shared(plan: Plan) -> Hashable:
    """Return the properties that a plan shares with its base plan, as a cache key."""
    sizes = plan.parallel_sizes
    return sizes.tp, sizes.ep, sizes.etp, plan.model.fp8.fp8_format, plan.model.fp8.fp4_format


def _base(plan: Plan, *, is_selective: bool) -> Plan:
    """Return the plan that is traced for bounds: 1F1B, without context parallelism, and without recompute.

    Selective recompute is kept if ``is_selective`` is set.
    """
    sizes = plan.parallel_sizes
    alone = dataclasses.replace(
        plan.model,
        context_parallel_size=1,
        pipeline_schedule=None,
        recompute_granularity=plan.model.recompute_granularity if is_selective else None,
        recompute_method=None,
        recompute_num_layers=None,
    )
    own = ParallelSizes(tp=sizes.tp, ep=sizes.ep, etp=sizes.etp)
    return dataclasses.replace(plan, model=alone, parallel_sizes=own, pipeline_schedule="1f1b")
