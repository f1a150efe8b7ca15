"""What a rank sends in a training step: in its micro-batches, between pipeline stages, and at the end of the step.

Messages of micro-batches were recorded with the traces of the pieces. The others follow from the plans that training
uses: stages, buckets and shards. They are counted as `process_group.CollectiveCall` counts them: by operation and axes,
with the bytes of the whole tensor that the operation is about.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.distributed.param_layout import parts_of_range, plan_buckets
from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.parallel_sizes import GRID_AXES, ParallelSizes, Place
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planner.layer_kinds import layer_numbers
from megatron.planner.piece_memory import recomputed_groups
from megatron.planner.pieces import end_trace, layer_trace
from megatron.planner.plan import Plan
from megatron.planner.traces import PHASES, PieceTrace
from megatron.planner.weight_gathers import num_gathers, parameters_of_buffers
from megatron.verification.traffic import Traffic, TrafficSum

if TYPE_CHECKING:
    from megatron.config.run_config import RunConfig

TP, CP, DP, PP, EMBEDDING = ("tp",), ("cp",), ("dp",), ("pp",), ("embedding",)
CP_INNER, CP_OUTER = ("cp_inner",), ("cp_outer",)
DP_CP_INNER, DP_CP_OUTER = ("dp_cp_inner",), ("dp_cp_outer",)
EXPERT_MODEL, EXPERT_DP = ("ep", "etp"), ("edp",)
EXPERT_DP_INNER, EXPERT_DP_OUTER = ("edp_inner",), ("edp_outer",)
DP_CP, MODEL_PARALLEL, WORLD = ("dp", "cp"), ("pp", "tp"), GRID_AXES
_FORWARD, _BACKWARD, _WEIGHTS = range(len(PHASES))
_ONCE = {_FORWARD: 1, _BACKWARD: 1, _WEIGHTS: 1}
_AGAIN = {_FORWARD: 2, _BACKWARD: 1, _WEIGHTS: 1}


@dataclass(frozen=True)
class StepRank:
    """Hold a rank of a configuration, and the sizes that its messages depend on."""

    config: RunConfig
    rank: int

    @property
    def sizes(self) -> ParallelSizes:
        """Return the grid of ranks."""
        return self.config.parallel_sizes

    @property
    def place(self) -> Place:
        """Return the rank's coordinates."""
        return self.sizes.place(self.rank)

    @property
    def chunks(self) -> tuple[StageContents, ...]:
        """Return the chunks of the rank's pipeline stage."""
        return self.config.stage_layout.chunks(self.place["pp"])

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches per step."""
        training = self.config.training
        return training.global_batch_size // (training.micro_batch_size * self.sizes.dp)

    @property
    def element(self) -> int:
        """Return the bytes of an element of the hidden states."""
        return ELEMENT_BYTES[self.config.model.params_dtype]

    @property
    def tokens(self) -> int:
        """Return the tokens of a micro-batch on the rank, before sequence parallelism shards them."""
        return self.config.data.seq_length // self.sizes.cp * self.config.training.micro_batch_size

    @property
    def hidden_bytes(self) -> int:
        """Return the bytes of the hidden states of these tokens."""
        return self.tokens * self.config.model.hidden_size * self.element

    def replicas(self, *, of_experts: bool) -> tuple[tuple[str, ...], int, int]:
        """Return the axes of the ranks with the same parameters, the rank's place among them, and their number."""
        sizes, place = self.sizes, self.place
        if of_experts and sizes.has_expert_grid:
            of_stage = (place["dp"] * sizes.cp + place["cp"]) * sizes.tp + place["tp"]
            return EXPERT_DP, of_stage // (sizes.ep * sizes.expert_tp), sizes.num_expert_replicas
        return DP_CP, place["dp"] * sizes.cp + place["cp"], sizes.num_replicas

    def group_sizes(self) -> dict[tuple[str, ...], int]:
        """Return the number of ranks of every group that communicates."""
        at_an_end = self.place["pp"] in (0, self.sizes.pp - 1)
        slices = {axes: self.sizes.size_of(axes) for axes in (TP, CP, DP, PP, DP_CP, MODEL_PARALLEL, WORLD)}
        slices |= {EXPERT_MODEL: self.sizes.ep * self.sizes.expert_tp, EXPERT_DP: self.sizes.num_expert_replicas}
        inner = self.config.model.cp_inner_size or 1
        levels = {CP_INNER: inner, CP_OUTER: self.sizes.cp // inner}
        copies = self.config.ddp.num_distributed_optimizer_instances
        levels |= {DP_CP_INNER: self.config.ddp.num_shards(self.sizes.num_replicas), DP_CP_OUTER: copies}
        experts = self.config.ddp.num_shards(self.sizes.num_expert_replicas)
        levels |= {EXPERT_DP_INNER: experts, EXPERT_DP_OUTER: copies}
        return slices | levels | {EMBEDDING: min(self.sizes.pp, 2) if at_an_end else 1}


def step_traffic(config: RunConfig, rank: int, capability: tuple[int, int]) -> Traffic:
    """Return what a rank sends in one training step on GPUs of a compute capability.

    Raises:
        ConfigurationError: this node cannot simulate CUDA, which traces of pieces need.
    """
    here, plan = StepRank(config, rank), Plan.of(config)
    total = TrafficSum(here.group_sizes())
    _add_samples(total, here)
    for chunk in here.chunks:
        for trace, times in _traces_of(plan, capability, chunk):
            for sent in trace.sent:
                # A piece is traced on as few data-parallel ranks as have all experts.
                if sent.axes != DP:
                    count = here.num_microbatches * times[sent.phase]
                    total.add(sent.operation, sent.axes, sent.num_bytes, count)
        _add_global_loss(total, here, chunk)
    add_sends(total, here)
    add_gradients(total, here)
    add_scalars(total, here)
    return {key: volume for key, volume in total.traffic.items() if volume.num_calls}


def _add_samples(total: TrafficSum, here: StepRank) -> None:
    """Add what the first rank of a tensor-parallel group sends the others of the samples that it reads."""
    from megatron.training.batch_source import batch_layout

    place = here.place
    num_bytes = batch_layout(here.config, place["pp"], place["cp"], here.config.model.vocab_size).num_bytes
    total.add("broadcast", TP, num_bytes, here.num_microbatches * (num_bytes > 0))


def _traces_of(
    plan: Plan, capability: tuple[int, int], chunk: StageContents
) -> Iterator[tuple[PieceTrace, dict[int, int]]]:
    """Yield the traces of a chunk's pieces, and how often each pass of them runs per micro-batch.

    Layers that are computed again together run forward one after the other. The last one stops as soon as all that the
    backward pass needs is saved, which its own trace shows.
    """
    if chunk.has_embedding:
        yield end_trace(plan, capability, has_loss=False), _ONCE
    numbers = chunk.layer_numbers
    groups, num_again = recomputed_groups(plan.model, len(numbers))
    for group in groups:
        *before, last = (numbers[place] for place in group)
        for number in before:
            yield layer_trace(plan, capability, number), _AGAIN
        yield layer_trace(plan, capability, last, is_again=True), _ONCE
    for number in numbers[num_again:]:
        yield layer_trace(plan, capability, number), _ONCE
    if chunk.has_loss:
        yield end_trace(plan, capability, has_loss=True), _ONCE


def _add_global_loss(total: TrafficSum, here: StepRank, chunk: StageContents) -> None:
    """Add how many tokens each expert has on all data-parallel ranks."""
    model = here.config.model
    if "global_aux_loss" not in model.moe_aux_losses:
        return
    numbers = layer_numbers(model, chunk)
    _, num_again = recomputed_groups(model, len(chunk.layer_numbers))
    again = [*numbers[:num_again], *(numbers[len(chunk.layer_numbers) :] if num_again else ())]
    forwards = sum(model.moe_layers[model.kind_of(number)] for number in [*numbers, *again])
    if "moe" in model.recomputed_modules:
        forwards *= 2
    score = max(here.element, 8 if model.moe_router_dtype == "fp64" else 4)
    total.add("all_reduce", DP, (model.num_experts or 0) * score, here.num_microbatches * forwards)


def add_sends(total: TrafficSum, here: StepRank) -> None:
    """Add activations for the next pipeline stage and gradients for the previous one."""
    message = here.hidden_bytes // (here.sizes.tp if here.config.model.sequence_parallel else 1)
    stage, last_stage, chunks = here.place["pp"], here.sizes.pp - 1, here.chunks
    for index in range(len(chunks)):
        is_first = index == 0 and stage == 0
        is_last = index == len(chunks) - 1 and stage == last_stage
        total.add("send", PP, message, here.num_microbatches * ((not is_first) + (not is_last)))


def add_gradients(total: TrafficSum, here: StepRank) -> None:
    """Add the reductions of gradients over replicas, copies and the ends of the pipeline, and the new parameters."""
    model, ddp, sizes = here.config.model, here.config.ddp, here.sizes
    grad_element = ELEMENT_BYTES[ddp.grad_dtype(model.params_dtype)]
    partial_bytes = 0
    for parameters, units in parameters_of_buffers(model, here.chunks, ddp.shards_over(sizes.num_replicas)):
        axes, replica, replicas = here.replicas(of_experts=parameters[0].is_expert)
        is_sharded, num_shards = ddp.shards_over(replicas), ddp.num_shards(replicas)
        has_copies = is_sharded and ddp.num_distributed_optimizer_instances > 1
        outer = EXPERT_DP_OUTER if axes == EXPERT_DP else DP_CP_OUTER
        if has_copies:
            axes = EXPERT_DP_INNER if axes == EXPERT_DP else DP_CP_INNER
        in_float8 = is_sharded and parameters[0].is_sent_in_float8
        element = 1 if in_float8 else here.element
        tied = [index for index, parameter in enumerate(parameters) if parameter.is_tied]
        buckets = plan_buckets([p.size for p in parameters], tied, ddp, replicas, units).buckets
        if in_float8:
            # The amax of every parameter, or of each expert's part of it, before what they scale is sent.
            is_of_bucket = ddp.overlap_param_gather and ddp.overlap_param_gather_with_optimizer_step
            scales = sum(parameter.num_scales for parameter in parameters)
            total.add("all_reduce", axes, 4 * scales, len(buckets) if is_of_bucket else 1)
        for bucket in buckets:
            grad_bytes = bucket.num_elements * grad_element
            if is_sharded:
                rounds = here.num_microbatches if ddp.shards_gradients else 1
                total.add("reduce_scatter", axes, grad_bytes, rounds)
                gathers = 1
                if ddp.shards_weights:
                    gathers = here.num_microbatches * num_gathers(units[bucket.slots[0].index])
                total.add("all_gather", axes, bucket.num_elements * element, gathers)
            else:
                total.add("all_reduce", axes, grad_bytes)
            start, end = bucket.start, bucket.end
            if is_sharded:
                start, end = bucket.shard(replica % num_shards, num_shards)
                total.add("all_reduce", outer, (end - start) * grad_element, int(has_copies))
            for part in parts_of_range(bucket.slots, start, end):
                parameter, part_bytes = parameters[part.index], (part.end - part.start) * grad_element
                if parameter.copies_to_sum:
                    partial_bytes += sizes.tp // parameter.copies_to_sum * part_bytes
                if parameter.is_tied:
                    total.add("all_reduce", EMBEDDING, part_bytes)
    if partial_bytes:
        total.add("all_reduce", TP, partial_bytes)


def add_scalars(total: TrafficSum, here: StepRank) -> None:
    """Add the token count, the gradient norm, and what all ranks agree on: a few float64 numbers each."""
    config = here.config
    if config.training.calculate_per_token_loss:
        total.add("broadcast", PP, 8)
        total.add("all_reduce", DP_CP, 8)
    sizes, num_further = here.sizes, config.model.num_further_tokens
    layers = sum(config.model.moe_layers) + num_further * config.model.moe_layers[-1]
    replicas = {sizes.num_replicas} | ({sizes.num_expert_replicas} if layers else set())
    is_of_world = sizes.has_expert_grid or any(config.ddp.shards_over(number) for number in replicas)
    norms = 16 if config.optimizer.log_num_zeros_in_grad else 8
    norms += 3 * 8 if config.optimizer.clips_by_kind else 0
    total.add("all_reduce", WORLD if is_of_world else MODEL_PARALLEL, norms)
    if layers:
        # How many tokens each expert was given, and how many choices were dropped.
        total.add("all_reduce", WORLD, 8 * layers * ((config.model.num_experts or 0) + 1))
    num_losses = bool(config.model.z_loss_coeff) + num_further
    if config.model.num_experts is not None:
        num_losses += len(config.model.moe_aux_losses) + bool(config.model.moe_z_loss_coeff)
    total.add("all_reduce", WORLD, 32 + 16 * num_losses)
    if config.faults.watches:
        # Whether every rank accepts the step.
        total.add("all_reduce", WORLD, 8)
    if config.model.fp8_recipe == "delayed" and config.model.fp8_format is not None:
        # The amax of each operand of each linear layer, and of each expert's two.
        places = config.model.float8_places
        total.add("all_reduce", WORLD, places.num_layers * places.num_places * 3 * 4)
