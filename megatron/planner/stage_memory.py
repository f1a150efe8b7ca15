"""The memory of a pipeline stage by part, before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from megatron.core.distributed.param_layout import MIN_POOL_SIZE, ParamLayout, plan_buckets
from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.models.gpt.chunk_parameters import ChunkParameter, chunk_parameters, gathered_units
from megatron.core.optimizer.optimizer_config import state_bytes
from megatron.core.pipeline_parallel.schedules import StagePlace, with_deferred_grads
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.planner.implementations import Implementation
from megatron.planner.piece_memory import ModelPieces, chunk_memory, fullest_moment
from megatron.planner.pieces import HOPPER, end_trace, layer_trace
from megatron.planner.plan import Plan
from megatron.planner.weight_gathers import WholeWeights, whole_weights

MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""Parts of a stage's memory in the order in which they are shown."""
_FLOAT8_COPIES = 2
"""A weight's fp8 copy and its transpose."""
_NONE_WHOLE = WholeWeights()


@dataclass(frozen=True)
class StageMemory:
    """Hold the bytes of a rank of one stage at the fullest moment of a step, and how many parameters it has.

    ``activations`` wait for backward passes. ``buffers`` are there for a moment: what a pass makes, what is computed
    again, gradients on their way, whole weights of layers that run.
    """

    parameters: int
    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buffers: int

    @property
    def total(self) -> int:
        """Return all parts together."""
        return sum(int(getattr(self, name)) for name in MEMORY_PARTS)


@dataclass(frozen=True)
class StageState:
    """Hold what a rank of a stage has between steps: it follows from the layout, not from batches or recompute.

    Frozen parameters have weights, and neither gradients nor state. ``gradient_pool`` is the memory of full buckets,
    through which gradients go that are sharded, ``gathered_bytes`` what trained weights are where they are gathered.
    ``whole`` are the bytes of weights that are there whole where weights are sharded. Of ``gathered_bytes`` and
    ``gradients`` the experts' part is named too: other ranks share it.
    """

    parameters: int
    gathered_bytes: int
    weights: int
    gradients: int
    gradient_pool: int
    optimizer: int
    whole: WholeWeights = _NONE_WHOLE
    expert_gathered_bytes: int = 0
    expert_gradients: int = 0

    @property
    def total(self) -> int:
        """Return all bytes together, with the least that is there of whole weights."""
        pools = self.gradient_pool + self.whole.rest + self.whole.layers
        return self.weights + self.gradients + self.optimizer + pools


def stage_state(plan: Plan, stage: int, implementation: Implementation) -> StageState:
    """Return what a stage's ranks hold between steps."""
    model, chunks = plan.model, plan.stage_layout.chunks(stage)
    parameters = [(chunk, chunk_parameters(model, chunk)) for chunk in chunks]
    grid = plan.parallel_sizes
    rest = _trained_state(plan, parameters, implementation, grid.num_replicas, of_experts=False)
    experts = _trained_state(plan, parameters, implementation, grid.num_expert_replicas, of_experts=True)
    element = ELEMENT_BYTES[model.params_dtype]
    num_frozen = sum(each.size for _, several in parameters for each in several if not each.is_trained)
    weights = num_frozen * element + rest.weights + experts.weights
    shards_weights = plan.ddp.shards_weights and plan.ddp.shards_over(grid.num_replicas)
    if implementation.caches_float8_weights and model.fp8_format is not None and not shards_weights:
        # Every GPU type with fp8 multiplies the same weights in it.
        traces = [layer_trace(plan, HOPPER, number) for chunk in chunks for number in chunk.layer_numbers]
        traces += [end_trace(plan, HOPPER, has_loss=True) for chunk in chunks if chunk.has_loss]
        copied = sum(trace.float8_weights for trace in traces)
        weights += (_FLOAT8_COPIES - (0 if implementation.keeps_half_weights else element)) * copied
    return StageState(
        parameters=rest.parameters + experts.parameters + num_frozen,
        gathered_bytes=rest.gathered_bytes + experts.gathered_bytes,
        weights=weights,
        gradients=rest.gradients + experts.gradients,
        gradient_pool=rest.gradient_pool + experts.gradient_pool,
        optimizer=rest.optimizer + experts.optimizer,
        whole=rest.whole.beside(experts.whole),
        expert_gathered_bytes=experts.gathered_bytes,
        expert_gradients=experts.gradients,
    )


def _trained_state(
    plan: Plan,
    parameters: Sequence[tuple[StageContents, Sequence[ChunkParameter]]],
    implementation: Implementation,
    replicas: int,
    *,
    of_experts: bool,
) -> StageState:
    """Return what a stage holds between steps of the trained parameters that so many ranks have alike."""
    shards, is_sharded = plan.ddp.num_shards(replicas), plan.ddp.shards_over(replicas)
    num_trained = num_elements = pool = gathered = optimizer_bytes = 0
    whole = WholeWeights()
    element = ELEMENT_BYTES[plan.model.params_dtype]
    shards_weights = plan.ddp.shards_weights and plan.ddp.shards_over(replicas)
    for chunk, several in parameters:
        labels = gathered_units(plan.model, chunk) if shards_weights else [0] * len(several)
        chosen = [
            (parameter, label)
            for parameter, label in zip(several, labels, strict=True)
            if parameter.is_trained and parameter.is_expert == of_experts
        ]
        if not chosen:
            continue
        trained, units = [parameter for parameter, _ in chosen], [label for _, label in chosen]
        sizes = [parameter.size for parameter in trained]
        tied = [index for index, parameter in enumerate(trained) if parameter.is_tied]
        num_trained += sum(sizes)
        in_matrices = sum(each.size for each in trained if each.is_matrix)
        optimizer_bytes += in_matrices * state_bytes(plan.optimizer, is_matrix=True)
        gathered += sum(each.size * (1 if each.is_sent_in_float8 else element) for each in trained)
        layout = plan_buckets(sizes, tied, plan.ddp, replicas, units if shards_weights else ())
        whole = whole.after(whole_weights(units, layout)) if shards_weights else whole
        num_elements += layout.num_elements
        num_held = layout.num_elements if is_sharded else sum(sizes)
        optimizer_bytes += (num_held - in_matrices) * state_bytes(plan.optimizer)
        # Gradients of experts are not deferred.
        deferred = [_defers(plan, each) and not of_experts for each in trained]
        trains_ends = any(each.name.startswith(("embedding.", "output_layer.")) for each in trained)
        has_shared = trains_ends and _shares_ends(plan, chunk)
        pool += _pooled_elements(layout, plan, deferred, tied, has_shared=has_shared)
    gradient = _gradient_bytes(plan, implementation)
    shards_gradients = plan.ddp.shards_gradients and is_sharded
    return StageState(
        parameters=num_trained,
        gathered_bytes=gathered,
        # Weights that are gathered lie in a flat buffer, with its padding, and so does the state of their shards.
        weights=(num_elements if is_sharded else num_trained) * element // (shards if shards_weights else 1),
        gradients=num_elements * gradient // (shards if shards_gradients else 1),
        gradient_pool=pool * gradient if shards_gradients else 0,
        optimizer=round(optimizer_bytes / (shards if is_sharded else 1) * (1.0 - plan.optimizer.offload_fraction)),
        whole=whole.times(element),
    )


def stage_memory(
    plan: Plan, stage: int, implementation: Implementation, pieces: ModelPieces, state: StageState | None = None
) -> StageMemory:
    """Return the memory of a stage's ranks.

    ``pieces`` is what `model_pieces` returned for this plan, ``state`` what `stage_state` did for one of the same
    layout.
    """
    model, chunks = plan.model, plan.stage_layout.chunks(stage)
    state = state or stage_state(plan, stage, implementation)
    gathered = state.whole.layers, state.whole.first
    memories = [chunk_memory(plan, pieces, chunk, gathered) for chunk in chunks]
    actions = with_deferred_grads(
        plan.warm_up_actions(stage),
        StagePlace(plan.parallel_sizes.pp, stage, len(chunks)),
        delays=model.delay_wgrad_compute,
        defers=model.defer_embedding_wgrad_compute,
        max_microbatches=model.wgrad_deferral_limit,
    )
    moment = fullest_moment(actions, memories, pieces.output_deferred)
    return StageMemory(
        parameters=state.parameters,
        weights=state.weights + state.whole.rest,
        gradients=state.gradients + state.gradient_pool,
        optimizer=state.optimizer,
        activations=moment.kept,
        logits=moment.logits,
        buffers=moment.working,
    )


def _pooled_elements(
    layout: ParamLayout, plan: Plan, deferred: Sequence[bool], tied: Collection[int], *, has_shared: bool
) -> int:
    """Return the elements of full buckets that a chunk keeps if its gradients are sharded.

    ``deferred`` says of each parameter whether its gradient is deferred. Buckets are filled in their order, and each is
    reduced when it and those before it are full. The last bucket stays open if it has weights that embedding and output
    layer share (``has_shared``), and so do all buckets from the first in which a gradient is deferred. Where a bucket
    ends within a layer, gradients of the next bucket come before the last of this one. ``tied`` parameters have buckets
    of their own. If reductions overlap, the next bucket, or the first of the next micro-batch, is filled while one is
    reduced.
    """
    buckets, overlaps = layout.buckets, plan.ddp.overlap_grad_reduce
    ends_in_layer, has_deferred = not plan.ddp.shards_weights, False
    num_open = num_allocated = int(has_shared)
    is_tied = [any(slot.index in tied for slot in bucket.slots) for bucket in buckets]
    for index, bucket in enumerate(buckets):
        is_next_filled = ends_in_layer and index + 1 < len(buckets) and not any(is_tied[index : index + 2])
        is_open = has_shared and index == len(buckets) - 1
        num_allocated = max(num_allocated, num_open + (not is_open) + is_next_filled)
        has_deferred = has_deferred or any(deferred[slot.index] for slot in bucket.slots)
        num_open += has_deferred and not is_open
    num_allocated = min(len(buckets), num_allocated)
    if overlaps:
        num_allocated = max(num_allocated, min(len(buckets) * plan.num_microbatches, MIN_POOL_SIZE))
    return num_allocated * max((bucket.num_elements for bucket in buckets), default=0)


def _defers(plan: Plan, parameter: ChunkParameter) -> bool:
    is_of_linear = parameter.is_matrix or parameter.name.startswith("output_layer.")
    return is_of_linear and (plan.pipeline_schedule == "zero-bubble" or plan.model.delay_wgrad_compute)


def _shares_ends(plan: Plan, chunk: StageContents) -> bool:
    # The embedding of further tokens has its gradient long before its turn.
    is_tied, has_further = not plan.model.untie_embeddings_and_output_weights, plan.model.num_further_tokens > 0
    return chunk.has_loss and (has_further or (chunk.has_embedding and is_tied))


def _gradient_bytes(plan: Plan, implementation: Implementation) -> int:
    if plan.model.params_dtype == "float16":
        return implementation.half_gradient_bytes
    if implementation.reduces_in_half:
        return ELEMENT_BYTES[plan.model.params_dtype]
    return ELEMENT_BYTES[plan.ddp.grad_dtype(plan.model.params_dtype)]
