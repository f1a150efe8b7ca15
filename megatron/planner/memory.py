"""Memory of a pipeline stage by part, before anything runs.

The memory of a stage is the combined memory of its pieces: layers, and the ends of the model. With FSDP the weights
that are gathered at the same time are added.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.config_base import with_fields
from megatron.core.distributed import MIN_POOL_SIZE, ParamLayout, plan_buckets
from megatron.core.models.gpt import ChunkParameter, GPTConfig, gathered_units
from megatron.core.models.gpt.chunk_parameters import chunk_parameters
from megatron.core.optimizer import state_bytes
from megatron.core.parallel_config import ELEMENT_BYTES
from megatron.core.pipeline_parallel import Action, Pass, StageContents, StagePlace, with_deferred_grads
from megatron.planner.gpu import Gpu
from megatron.planner.implementations import Implementation, SavedBytes, expert_layer, score_elements
from megatron.planner.plan import Plan, layer_kinds, layer_numbers
from megatron.planner.trace_store import default_store
from megatron.planner.traces import PieceMemory, PieceTrace, TraceRequest

NOTHING = PieceMemory(0, 0, 0)


@dataclass(frozen=True)
class ModelPieces:
    """Memory of every piece of a model for one micro-batch, without activation recomputation and offload.

    ``layers`` are in the order of the model. ``embedding`` and ``loss`` are its ends; ``loss`` has the final norm, the
    MTP modules, the output layer and the loss. ``input_bytes`` are the bytes of a layer's input as recompute saves it,
    and ``gradient_bytes`` those of a layer's incoming gradient. ``output_deferred`` are the bytes that the deferred
    weight gradient of the output layer keeps. ``again`` has the layers with full recompute, each traced alone; it is
    empty if they were not traced.
    """

    layers: Sequence[PieceMemory]
    embedding: PieceMemory
    loss: PieceMemory
    input_bytes: int
    gradient_bytes: int
    output_deferred: int = 0
    again: Sequence[PieceMemory] = ()


@dataclass(frozen=True)
class FullestMoment:
    """Activation memory of a stage at the peak: saved activations for backward passes, and work space of a pass.

    ``logits`` are not included in the other two.
    """

    kept: int
    working: int
    logits: int

    @property
    def total(self) -> int:
        return self.kept + self.working + self.logits


def chunk_memory(plan: Plan, pieces: ModelPieces, chunk: StageContents, whole_weights: tuple[int, int]) -> PieceMemory:
    """Return the memory of a chunk's forward and backward pass, with the plan's recompute and offload.

    ``whole_weights`` are the bytes of weights that FSDP gathers while a layer runs, and while the embedding runs.
    """
    of_layer, of_first = whole_weights
    members = [_with_weights(pieces.embedding, of_first)] if chunk.has_embedding else []
    if plan.model.shares_tensors:
        members.append(_shared_memory(plan, chunk))
    groups = _offloaded(plan, _groups(plan, pieces, chunk.layer_numbers))
    members += [_with_weights(each, of_layer) for each in groups]
    if chunk.has_loss:
        members.append(pieces.loss)
    return in_sequence(members)


def _shared_memory(plan: Plan, chunk: StageContents) -> PieceMemory:
    """Return the memory of the tensors that a chunk's layers share, and of its messages.

    Passes keep keys and values of earlier stages, and with full recompute the inputs of all layers.
    """
    model, element = plan.model, ELEMENT_BYTES[plan.model.params_dtype]
    _, per_layer, *key_values = model.message_widths
    per_layer *= plan.num_rows * element
    first = min(chunk.layer_numbers, default=model.num_layers)
    earlier = sum(width for source, width in zip(model.shared_key_values, key_values) if source < first)
    kept = plan.num_rows * earlier * element + per_layer * (model.recompute_granularity == "full")
    message = plan.message_bytes * (not chunk.has_embedding or not chunk.has_loss)
    return PieceMemory(kept, kept + message, kept + message)


def in_sequence(members: Sequence[PieceMemory]) -> PieceMemory:
    """Return the memory of pieces that run forward one after the other, and backward in reverse order."""
    before = forward = backward = logits = 0
    waiting = sum(each.deferred for each in members)
    for each in members:
        waiting -= each.deferred
        forward = max(forward, before + each.forward_peak)
        peak = before + each.backward_peak + waiting
        backward, logits = max((backward, logits), (peak, each.logits))
        before += each.kept
    return PieceMemory(before, forward, backward, sum(each.deferred for each in members), logits)


def fullest_moment(actions: Sequence[Action], chunks: Sequence[PieceMemory], output_deferred: int) -> FullestMoment:
    """Return the peak activation memory of a stage over its schedule actions."""
    late = {action.microbatch for action in actions if action.kind is Pass.OUTPUT_WEIGHT}
    held, last, most = 0, len(chunks) - 1, FullestMoment(0, 0, 0)
    for kind, microbatch, number in actions:
        chunk = chunks[number]
        if kind is Pass.FORWARD:
            moment = _moment(held, chunk, chunk.forward_peak)
            held += chunk.kept
        elif kind in (Pass.BACKWARD, Pass.BACKWARD_INPUT):
            held -= chunk.kept
            moment = _moment(held, chunk, chunk.backward_peak)
            held += chunk.deferred if kind is Pass.BACKWARD_INPUT else 0
            held += output_deferred if kind is Pass.BACKWARD and number == last and microbatch in late else 0
        else:
            held -= chunk.deferred if kind is Pass.BACKWARD_WEIGHT else output_deferred
            continue
        most = max(most, moment, key=lambda each: each.total)
    return most


def _moment(held: int, chunk: PieceMemory, peak: int) -> FullestMoment:
    """Return the peak of one pass while ``held`` bytes are saved for other passes; a chunk may save logits too."""
    logits = min(chunk.logits, peak)
    kept = min(max(0, chunk.kept - logits), peak - logits)
    return FullestMoment(held + kept, peak - logits - kept, logits)


def _with_weights(piece: PieceMemory, num_bytes: int) -> PieceMemory:
    if not num_bytes:
        return piece
    return replace(piece, forward_peak=piece.forward_peak + num_bytes, backward_peak=piece.backward_peak + num_bytes)


def _offloaded(plan: Plan, groups: Sequence[tuple[int, PieceMemory]]) -> Sequence[PieceMemory]:
    """Return the memory of a chunk's groups of layers, with activation offload of the first groups.

    Two offloaded groups are in transit at the same time. ``groups`` has the index of the first layer of each group.
    """
    model = plan.model
    number = model.num_offloaded_layers if model.cpu_offloading_activations else 0
    under_way = sum(sorted(each.kept for place, each in groups if place < number)[-2:])
    return [
        replace(each, kept=0, backward_peak=each.backward_peak + under_way - each.kept) if place < number else each
        for place, each in groups
    ]


def _groups(plan: Plan, pieces: ModelPieces, numbers: Sequence[int]) -> Sequence[tuple[int, PieceMemory]]:
    """Return the memory of each group of layers in a chunk, with the index of its first layer.

    A group is either recomputed, and saves its input alone, or is one layer that saves its activations.
    """
    several, again = recomputed_groups(plan.model, len(numbers))
    groups = [(group[0], _run_again(pieces, [numbers[place] for place in group])) for group in several]
    return [*groups, *((place, pieces.layers[numbers[place]]) for place in range(again, len(numbers)))]


def recomputed_groups(model: GPTConfig, num_layers: int) -> tuple[Sequence[range], int]:
    """Return the groups of a chunk's layers that full recompute runs again, as indices, and the number of these layers.

    They are the first layers of the chunk.
    """
    if model.recompute_granularity != "full":
        return [], 0
    length = model.recompute_num_layers or 1
    again, step = (min(length, num_layers), 1) if model.recompute_method == "block" else (num_layers, length)
    return [range(start, min(start + step, again)) for start in range(0, again, step)], again


def _run_again(pieces: ModelPieces, numbers: Sequence[int]) -> PieceMemory:
    """Return the memory of a group of layers that is recomputed before its backward passes."""
    group = [pieces.layers[number] for number in numbers]
    if not pieces.again:
        return _derived(pieces, group)
    of_first = pieces.again[numbers[0]]
    if len(numbers) == 1:
        return of_first
    # The trace of a recomputed layer has the work space that its second forward pass leaves.
    more = of_first.backward_peak - _derived(pieces, group[:1]).backward_peak
    derived = _derived(pieces, group)
    return replace(derived, kept=of_first.kept, backward_peak=derived.backward_peak + max(0, more))


def _derived(pieces: ModelPieces, group: Sequence[PieceMemory]) -> PieceMemory:
    whole = in_sequence(group)
    again = max(whole.forward_peak + pieces.gradient_bytes, whole.backward_peak)
    # In the first forward pass, the memory of each layer is freed when it ends.
    forward = max(each.forward_peak for each in group)
    return PieceMemory(pieces.input_bytes, forward, again, whole.deferred, whole.logits)


_SCORES_AT_WORK = 3
"""Tensors of attention scores in the backward pass of one layer."""
HOPPER, _BLACKWELL = (9, 0), (10, 0)


def _typical_capability(plan: Plan) -> tuple[int, int]:
    """Return the compute capability of the traces if no GPU type is given: of one that has the plan's matmuls.

    Weights are the same on all of them.
    """
    return HOPPER if plan.model.fp8.fp4_format is None else _BLACKWELL


def model_pieces(plan: Plan, implementation: Implementation, gpu: Gpu | None) -> ModelPieces:
    """Return the memory of every piece of a plan's model for one micro-batch.

    Raises:
        ConfigurationError: this node cannot simulate CUDA, which traces of pieces need.
    """
    model, element = plan.model, ELEMENT_BYTES[plan.model.params_dtype]
    hidden = plan.num_rows * model.hidden_size * element
    kept_input = hidden // plan.parallel_sizes.tp if model.distribute_saved_activations else hidden
    numbers = _representatives(model, plan.seq_length)
    own, again = numbers[: model.num_layers], dict[int, PieceMemory]()
    if implementation.saved is None:
        capability = _typical_capability(plan) if gpu is None else gpu.capability
        of_number = {number: layer_trace(plan, capability, number).memory for number in set(own)}
        if model.recompute_granularity == "full":
            again = {number: layer_trace(plan, capability, number, is_again=True).memory for number in set(own)}
        embedding = end_trace(plan, capability, has_loss=False).memory
    else:
        of_number = {number: _described_layer(plan, implementation, number) for number in set(own)}
        embedding = NOTHING
    deferred = 0
    if implementation.is_traced:
        loss = end_trace(plan, _typical_capability(plan) if gpu is None else gpu.capability, has_loss=True).memory
        if model.defer_embedding_wgrad_compute:
            deferred = plan.num_predictions * model.hidden_size * element + loss.logits
    else:
        loss = _described_loss(plan, implementation, of_number[own[-1]])
    return ModelPieces(
        layers=[of_number[number] for number in own],
        embedding=embedding,
        loss=loss,
        input_bytes=kept_input,
        gradient_bytes=hidden,
        output_deferred=deferred,
        again=[again[number] for number in own] if again else (),
    )


def layer_trace(plan: Plan, capability: tuple[int, int], number: int, *, is_again: bool = False) -> PieceTrace:
    """Return the trace of a layer, or of the first equal layer, with selective recompute if the plan has it.

    ``is_again`` is set for a single layer that full recompute runs again.
    """
    contents = StageContents((_representatives(plan.model, plan.seq_length)[number],))
    return default_store().trace(_request(plan, capability, contents, is_again=is_again))


def end_trace(plan: Plan, capability: tuple[int, int], *, has_loss: bool) -> PieceTrace:
    """Return the trace of the embedding, or of the final norm, the MTP modules, the output layer and the loss."""
    contents = StageContents((), has_embedding=not has_loss, has_loss=has_loss)
    return default_store().trace(_request(plan, capability, contents))


def _request(
    plan: Plan, capability: tuple[int, int], contents: StageContents, *, is_again: bool = False
) -> TraceRequest:
    splits = plan.pipeline_schedule == "zero-bubble" or plan.model.delay_wgrad_compute
    splits = splits and (contents.has_loss or len(contents.layer_numbers) > 0)
    return _request_of(
        plan.model,
        contents,
        plan.seq_length,
        plan.micro_batch_size,
        capability,
        splits,
        plan.ddp.gradient_accumulation_fusion,
        not plan.ddp.grad_reduce_in_bf16,
        is_again,
    )


# It takes longer to compute a request's key than to look it up, and a search repeats requests thousands of times.
@functools.lru_cache(maxsize=8192)
def _request_of(
    model: GPTConfig,
    contents: StageContents,
    seq_length: int,
    micro_batch_size: int,
    capability: tuple[int, int],
    splits_backward: bool,
    fuses_accumulation: bool,
    reduces_in_float32: bool,
    is_again: bool,
) -> TraceRequest:
    return TraceRequest(
        model=_for_trace(model, is_again=is_again, is_end=not contents.layer_numbers),
        contents=contents,
        seq_length=seq_length,
        micro_batch_size=micro_batch_size,
        capability=capability,
        splits_backward=splits_backward,
        fuses_accumulation=fuses_accumulation,
        reduces_in_float32=reduces_in_float32,
    )


# A search repeats the same models thousands of times.
@functools.lru_cache(maxsize=4096)
def _for_trace(model: GPTConfig, *, is_again: bool, is_end: bool) -> GPTConfig:
    """Return the model that is traced: without full recompute, except for a layer that is traced as recomputed.

    At the ends of a model, recompute and FP8 apply to the MTP modules alone.
    """
    alone = {"recompute_method": "uniform", "recompute_num_layers": 1}
    none = {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    fields: dict[str, Any] = {}
    if is_end and not model.mtp.mtp_depth:
        fields = none | {"fp8_format": None, "fp4_format": None, "distribute_saved_activations": False}
    elif model.recompute_granularity == "full":
        fields = alone if is_again or is_end else none | {"distribute_saved_activations": False}
    return with_fields(model, **fields) if fields else model


# A search repeats the same models thousands of times.
@functools.lru_cache(maxsize=1024)
def _representatives(model: GPTConfig, seq_length: int) -> Sequence[int]:
    """Return for each layer, including those of the MTP modules, the number of the first equal layer."""
    first: dict[object, int] = {}
    kinds = layer_kinds(model, seq_length)
    # A layer after a frozen embedding saves less.
    keys = [(kind, number == 0 and bool(model.lora_rank)) for number, kind in enumerate(kinds)]
    return [first.setdefault(key, number) for number, key in enumerate(keys)]


def _described_layer(plan: Plan, implementation: Implementation, number: int) -> PieceMemory:
    """Return the memory of another program's layer: saved activations, and gradients within its feed-forward."""
    assert implementation.saved is not None
    model, element = plan.model, ELEMENT_BYTES[plan.model.params_dtype]
    kept, whole = (_sum(implementation.saved, each, plan, number) for each in _with_and_without_recompute(model))
    at_work = element * _feed_forward_gradients(plan, has_experts=model.has_experts(number))
    if not implementation.has_flash_attention:
        at_work += _SCORES_AT_WORK * element * score_elements(model, plan.seq_length, plan.micro_batch_size)
    return PieceMemory(kept, kept, whole + at_work)


def _described_loss(plan: Plan, implementation: Implementation, further: PieceMemory) -> PieceMemory:
    """Return the memory of another program's final norm, MTP modules, output layer and loss."""
    model, element = plan.model, ELEMENT_BYTES[plan.model.params_dtype]
    logits = plan.num_logits * (element + implementation.wide_logit_bytes)
    inputs = 1 if model.lora_rank else 2 + model.mtp.mtp_depth
    ends = inputs * plan.num_rows * model.hidden_size * element
    if model.sequence_parallel:
        ends += element * plan.num_predictions * model.hidden_size  # gathered input of the output layer
    if not implementation.fuses_weight_gradients and not model.lora_rank:
        ends += element * (model.padded_vocab_size // plan.parallel_sizes.tp) * model.hidden_size
    kept = model.mtp.mtp_depth * further.kept
    return PieceMemory(kept, kept + ends + logits, kept + ends + logits, 0, logits)


def _sum(saved: SavedBytes, model: GPTConfig, plan: Plan, number: int) -> int:
    return sum(saved(model, plan.seq_length, plan.micro_batch_size, number).values())


@functools.lru_cache(maxsize=256)
def _with_and_without_recompute(model: GPTConfig) -> tuple[GPTConfig, GPTConfig]:
    """Return the model with its selective recompute, if any, and the model without recompute."""
    without = model
    if model.recompute_granularity is not None:
        without = dataclasses.replace(model, recompute_granularity=None)
    return (model if model.recompute_granularity == "selective" else without), without


def _feed_forward_gradients(plan: Plan, *, has_experts: bool) -> int:
    """Return the gradient elements in a feed-forward's backward pass: output, intermediate activations, gates."""
    model, at_work = plan.model, plan.num_rows * plan.model.hidden_size
    if has_experts:
        return at_work + expert_layer(plan).at_work
    return at_work + plan.num_tokens * model.ffn_hidden_size // model.tensor_model_parallel_size * (2 + model.is_gated)


FIRST, REST = -1, -2
"""Labels of `gathered_units` outside the layers: of an embedding that is used once, and of all other weights."""


def parameters_of_buffers(
    model: GPTConfig, chunks: Sequence[StageContents], is_sharded: bool
) -> Iterator[tuple[list[ChunkParameter], list[int]]]:
    """Yield the trained parameters of each chunk by gradient buffer, with their labels of `gathered_units`.

    Experts have buffers of their own, and so have parameters that are gathered in FP8 if parameters are sharded.
    """
    for chunk in chunks:
        by_kind: dict[tuple[bool, bool], tuple[list[ChunkParameter], list[int]]] = {}
        for parameter, unit in zip(chunk_parameters(model, chunk), gathered_units(model, chunk), strict=True):
            if parameter.is_trained:
                kind = parameter.is_expert, is_sharded and parameter.is_sent_in_float8
                of_kind, units = by_kind.setdefault(kind, ([], []))
                of_kind.append(parameter)
                units.append(unit)
        yield from by_kind.values()


@dataclass(frozen=True)
class WholeWeights:
    """Size of the weights that FSDP has gathered at the same time.

    ``rest`` is outside the layers and stays gathered. In addition there are ``layers`` (the layer that runs and the
    next one) or ``first`` (the embedding that is used once, and the layer after it).
    """

    rest: int = 0
    layers: int = 0
    first: int = 0

    def beside(self, other: WholeWeights) -> WholeWeights:
        """Return the sum of these weights and other weights of the same layers."""
        return WholeWeights(self.rest + other.rest, self.layers + other.layers, self.first + other.first)

    def after(self, other: WholeWeights) -> WholeWeights:
        """Return the maximum of these weights and those of another chunk, whose layers run at other times."""
        return WholeWeights(self.rest + other.rest, max(self.layers, other.layers), max(self.first, other.first))

    def times(self, size: int) -> WholeWeights:
        """Convert the numbers of elements to bytes; ``size`` is bytes per element."""
        return WholeWeights(size * self.rest, size * self.layers, size * self.first)


def whole_weights(units: Sequence[int], layout: ParamLayout) -> WholeWeights:
    """Return the elements of a chunk's gathered weights; ``units`` has a label for each parameter."""
    sizes: dict[int, int] = {}
    for bucket in layout.buckets:
        label = units[bucket.ranges[0].index]
        sizes[label] = sizes.get(label, 0) + bucket.num_elements
    layers = sorted((size for label, size in sizes.items() if label >= 0), reverse=True)
    first = sizes.get(FIRST, 0)
    return WholeWeights(sizes.get(REST, 0), sum(layers[:2]), first + sum(layers[:1]) if first else 0)


def num_gathers(label: int) -> int:
    """Return how often FSDP gathers a unit's weights per micro-batch.

    Weights of a layer are freed between its passes. An embedding is not needed in the backward pass. All other weights
    stay.
    """
    return 2 if label >= 0 else 1


MEMORY_PARTS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""Parts of a stage's memory, in the order of reports."""
_QUANTIZED_COPIES = 2
"""Copies of a weight in FP8 or NVFP4: as it is, and transposed."""
_NONE_WHOLE = WholeWeights()


@dataclass(frozen=True)
class StageMemory:
    """Memory of a rank of one stage at the peak of a step, by part, and its number of parameters.

    ``activations`` are saved for backward passes. ``buffers`` are temporary: work space of a pass, recomputed
    activations, gradients in transit, gathered weights.
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
        return sum(int(getattr(self, name)) for name in MEMORY_PARTS)


@dataclass(frozen=True)
class StageState:
    """Memory of a rank of a stage between steps; it depends on the layout, not on batches or recompute.

    Frozen parameters have weights, but neither gradients nor optimizer state. ``gradient_pool`` is the memory of the
    full buckets from which sharded gradients are reduced. ``gathered_bytes`` are the bytes of trained parameters that
    are all-gathered. ``whole`` has the bytes that are gathered at the same time if weights are sharded. The experts'
    parts of ``gathered_bytes`` and ``gradients`` are counted separately too, since other ranks share them.
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
        """Return the sum of all parts, with the minimum of gathered weights."""
        pools = self.gradient_pool + self.whole.rest + self.whole.layers
        return self.weights + self.gradients + self.optimizer + pools


def stage_state(plan: Plan, stage: int, implementation: Implementation) -> StageState:
    """Return the memory of a stage's ranks between steps."""
    model, chunks = plan.model, plan.stage_layout.chunks(stage)
    parameters = [(chunk, chunk_parameters(model, chunk)) for chunk in chunks]
    grid = plan.parallel_sizes
    rest = _trained_state(plan, parameters, implementation, grid.num_replicas, of_experts=False)
    experts = _trained_state(plan, parameters, implementation, grid.num_expert_replicas, of_experts=True)
    element = ELEMENT_BYTES[model.params_dtype]
    frozen = [each for _, several in parameters for each in several if not each.is_trained]
    num_frozen = sum(each.size for each in frozen)
    weights = sum(each.num_bytes(element) for each in frozen) + rest.weights + experts.weights
    shards_weights = plan.ddp.shards_weights and plan.ddp.shards_over(grid.num_replicas)
    if implementation.caches_float8_weights and model.fp8.fp8_format is not None and not shards_weights:
        # The same weights are in FP8 on every GPU type that has FP8.
        traces = [layer_trace(plan, HOPPER, number) for chunk in chunks for number in chunk.layer_numbers]
        traces += [end_trace(plan, HOPPER, has_loss=True) for chunk in chunks if chunk.has_loss]
        copied = sum(trace.quantized_weight_bytes for trace in traces)
        weights += (_QUANTIZED_COPIES - (0 if implementation.keeps_half_weights else element)) * copied
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
    """Return the part of a stage's state that belongs to trained parameters with ``replicas`` copies."""
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
        # Gathered weights are in a flat buffer with padding, and so is the optimizer state of their shards.
        weights=(num_elements if is_sharded else num_trained) * element // (shards if shards_weights else 1),
        gradients=num_elements * gradient // (shards if shards_gradients else 1),
        gradient_pool=pool * gradient if shards_gradients else 0,
        optimizer=round(optimizer_bytes / (shards if is_sharded else 1) * (1.0 - plan.optimizer.offload_fraction)),
        whole=whole.times(element),
    )


def stage_memory(
    plan: Plan, stage: int, implementation: Implementation, pieces: ModelPieces, state: StageState | None = None
) -> StageMemory:
    """Return the peak memory of a stage's ranks.

    ``pieces`` is the result of `model_pieces` for this plan. ``state`` is the result of `stage_state` for this plan, or
    for another plan of the same layout.
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
        weights=state.weights + state.whole.rest + _kept_bytes(plan, chunks, implementation),
        gradients=state.gradients + state.gradient_pool,
        optimizer=state.optimizer,
        activations=moment.kept,
        logits=moment.logits,
        buffers=moment.working,
    )


def _kept_bytes(plan: Plan, chunks: Sequence[StageContents], implementation: Implementation) -> int:
    """Return the bytes of quantized weights and transposes that this program keeps from micro-batch to micro-batch."""
    shards_weights = plan.ddp.shards_weights and plan.ddp.shards_over(plan.parallel_sizes.num_replicas)
    is_cast_again = shards_weights or plan.uses_cuda_graphs or plan.model.cpu_offloading_weights
    if is_cast_again or not (implementation.is_traced and plan.model.fp8.keeps_weights(plan.num_microbatches)):
        return 0
    numbers = [number for chunk in chunks for number in layer_numbers(plan.model, chunk)]
    traces = (layer_trace(plan, _typical_capability(plan), number) for number in numbers)
    return _QUANTIZED_COPIES * sum(trace.quantized_weight_bytes for trace in traces)


def _pooled_elements(
    layout: ParamLayout, plan: Plan, deferred: Sequence[bool], tied: Collection[int], *, has_shared: bool
) -> int:
    """Return the elements of the full buckets that are allocated for a chunk if gradients are sharded.

    ``deferred`` says for each parameter whether its weight gradient is deferred. Buckets are filled in order, and each
    is reduced when it and all buckets before it are full. The last bucket stays open if it has weights that embedding
    and output layer share (``has_shared``), and so do all buckets from the first one with a deferred gradient. If a
    bucket ends within a layer, gradients of the next bucket are computed before the last gradient of this bucket.
    ``tied`` parameters have buckets of their own. If reductions overlap, the next bucket, or the first bucket of the
    next micro-batch, is filled while a bucket is reduced.
    """
    buckets, overlaps = layout.buckets, plan.ddp.overlap_grad_reduce
    ends_in_layer, has_deferred = not plan.ddp.shards_weights, False
    num_open = num_allocated = int(has_shared)
    is_tied = [any(each.index in tied for each in bucket.ranges) for bucket in buckets]
    for index, bucket in enumerate(buckets):
        is_next_filled = ends_in_layer and index + 1 < len(buckets) and not any(is_tied[index : index + 2])
        is_open = has_shared and index == len(buckets) - 1
        num_allocated = max(num_allocated, num_open + (not is_open) + is_next_filled)
        has_deferred = has_deferred or any(deferred[each.index] for each in bucket.ranges)
        num_open += has_deferred and not is_open
    num_allocated = min(len(buckets), num_allocated)
    if overlaps:
        num_allocated = max(num_allocated, min(len(buckets) * plan.num_microbatches, MIN_POOL_SIZE))
    return num_allocated * max((bucket.num_elements for bucket in buckets), default=0)


def _defers(plan: Plan, parameter: ChunkParameter) -> bool:
    is_of_linear = parameter.is_matrix or parameter.name.startswith("output_layer.")
    return is_of_linear and (plan.pipeline_schedule == "zero-bubble" or plan.model.delay_wgrad_compute)


def _shares_ends(plan: Plan, chunk: StageContents) -> bool:
    # The embedding of an MTP module gets its gradient long before its bucket is reduced.
    is_tied, has_further = not plan.model.untie_embeddings_and_output_weights, plan.model.mtp.mtp_depth > 0
    return chunk.has_loss and (has_further or (chunk.has_embedding and is_tied))


def _gradient_bytes(plan: Plan, implementation: Implementation) -> int:
    if plan.model.params_dtype == "float16":
        return implementation.half_gradient_bytes
    if implementation.reduces_in_half:
        return ELEMENT_BYTES[plan.model.params_dtype]
    return ELEMENT_BYTES[plan.ddp.grad_dtype(plan.model.params_dtype)]
