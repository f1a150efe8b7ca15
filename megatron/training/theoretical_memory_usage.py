"""Theoretical memory usage: parameters, saved activations and optimizer state in closed form.

Parameter counts are exact, with the padding of the vocabulary. The activations in Megatron-LM's lines are those of
Korthikanti et al. 2022 (table 2, https://arxiv.org/abs/2205.05198), for attention that saves no scores and dropout
that saves no masks; temporary tensors of kernels are left out.

The estimate of saved activations reads the matrices of the model that the code builds on the meta device, adds copies
for context parallelism and the inputs of query and key norms, and multiplies by the passes in flight of the pipeline
schedule. It decides how much to offload. The planner measures saved activations in traces of the layers instead
(`megatron.planner.traces`).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.config_base import with_fields
from megatron.core.context_parallel import copies_of_key_value_heads, key_value_heads_of_rank
from megatron.core.models.gpt import ChunkParameter, GPTConfig
from megatron.core.models.gpt.chunk_parameters import chunk_parameters
from megatron.core.optimizer import state_bytes
from megatron.core.parallel_config import ELEMENT_BYTES
from megatron.core.pipeline_parallel import StageContents, first_actions, most_in_flight
from megatron.core.tensor_parallel import chunk_rows

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.core.models.gpt import GPTConfig


_READ_FIRST_NORM = ("linear_qkv", "linear_q", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj")
"""Linear layers of an attention layer that read the output of the norm before it."""
_UP_PROJECTIONS = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
"""Linear layers of multi-head latent attention (MLA) whose outputs --recompute-modules mla_up_proj recomputes."""
_JOINED = 5
"""Number of hidden states that a multi-token prediction (MTP) module saves in addition to its layer: the inputs of
three norms, and the two that it concatenates."""


def saved_layer_bytes(model: GPTConfig, tokens: int, number: int, recomputed: Collection[str] = ()) -> int:
    """Return the bytes that a layer saves for a micro-batch with ``tokens`` tokens per tensor-parallel group.

    ``recomputed`` are the modules of --recompute-modules that are recomputed. Layers from ``num_layers`` on belong to
    the MTP modules.
    """
    layer, sizes = _Layer(model.of_layer(number), number, frozenset(recomputed)), model.parallel_sizes
    # A balanced load gives each rank's experts their share of the routed tokens.
    choices = tokens * model.moe.moe_router_topk * sizes.expert_tp // sizes.tp
    saved = sum(
        (choices if each.is_expert else tokens) * layer.bytes_per_token(each)
        for each in chunk_parameters(model, StageContents((number,)))
    )
    saved += tokens * layer.bytes_without_matrices()
    # The input of the per-layer branch joined with its gate.
    joined = model.hidden_size_per_layer_input * ELEMENT_BYTES[model.params_dtype]
    saved += tokens * joined // (model.tensor_model_parallel_size if model.sequence_parallel else 1)
    num_hidden = _JOINED * (number >= model.num_layers) + 2 * (model.norm_placement not in ("pre", "post"))
    return saved + num_hidden * hidden_bytes(model, tokens, is_sharded=model.sequence_parallel)


def hidden_bytes(model: GPTConfig, tokens: int, *, is_sharded: bool) -> int:
    """Return the bytes of a rank's hidden states of ``tokens`` tokens, whole or sharded by tensor parallelism."""
    rows = tokens // (model.tensor_model_parallel_size if is_sharded else 1)
    return rows * model.hidden_size * ELEMENT_BYTES[model.params_dtype]


@dataclass(frozen=True)
class _Layer:
    """Activations of one layer that are saved as inputs and outputs of its matrices."""

    model: GPTConfig
    number: int
    recomputed: frozenset[str]

    @property
    def element(self) -> int:
        return ELEMENT_BYTES[self.model.params_dtype]

    @property
    def has_experts(self) -> bool:
        return self.model.has_experts(self.number)

    @property
    def saves_core(self) -> bool:
        return "core_attn" not in self.recomputed

    @property
    def cp_exchange(self) -> str:
        """Return how context-parallel ranks exchange keys and values, or an empty string for one rank."""
        return self.model.cp_exchange(self.model.kind_of(self.number)) if self.model.context_parallel_size > 1 else ""

    @property
    def is_copied(self) -> bool:
        """Return whether context parallelism copies queries, keys and values."""
        return self.cp_exchange not in ("", "p2p")

    @property
    def pads_values(self) -> bool:
        """Return whether values are padded to the width of the keys, as with MLA or ALiBi."""
        return self.model.value_width < self.model.head_width

    @property
    def extends_heads(self) -> bool:
        """Return whether core attention saves copies of queries, keys and values with the channels of ALiBi."""
        return self.model.alibi_slopes is not None and self.saves_core

    def bytes_per_token(self, matrix: ChunkParameter) -> int:
        """Return the saved bytes of a matrix's input and output, per token that the matrix processes."""
        name, _, adapter = matrix.name.partition(".adapters.")
        linear = name.removesuffix(".weight").rpartition(".")[2]
        if adapter:
            # An adapter shares its layer's input, unless dropout makes a copy, and its output is added to the layer's.
            is_first = adapter.endswith("lora_A")
            reads = matrix.reads * (self.model.lora_dropout > 0.0)
            is_recomputed = name.startswith("mlp.") and self._recomputes_feed_forward
            return (matrix.writes + reads) * self.element * is_first * (not is_recomputed)
        if name.startswith("mlp."):
            return (self._of_experts if self.has_experts else self._of_mlp)(matrix, linear)
        writes = matrix.writes * self.element
        if self.model.mla.multi_latent_attention and linear in _UP_PROJECTIONS and "mla_up_proj" in self.recomputed:
            writes = 0
        if linear == "linear_kv_up_proj" and (self.pads_values or self.is_copied):
            writes = 0
        copies_heads = self.extends_heads and not self.model.qk_layernorm and not self.model.clip_qkv
        if linear in ("linear_qkv", "linear_q") and copies_heads:
            writes = 0
        if linear == "linear_proj":
            return self._of_attention_output(matrix) + writes
        if linear not in _READ_FIRST_NORM:
            return self._input(matrix, linear) + writes
        # The two down-projections of MLA share their input.
        is_counted = "layernorm" not in self.recomputed and (linear != "linear_kv_down_proj" or self._rounds)
        return self._input(matrix, linear) * is_counted + writes

    def bytes_without_matrices(self) -> int:
        """Return the bytes per token that the attention saves and that are no matrix's input or output."""
        model, tp = self.model, self.model.tensor_model_parallel_size
        heads, groups = model.num_attention_heads // tp, key_value_heads_of_rank(model.num_query_groups, tp)
        exchange, query_width, key_width = self.cp_exchange, heads * model.kv_channels, groups * model.kv_channels
        width, borrows = 0, model.key_value_sources[model.kind_of(self.number)] is not None
        if model.mla.multi_latent_attention:
            # Keys are concatenated with their rotary part; values are padded to the width of the keys, or copied.
            key_width = heads * model.mla.latent_head_width
            is_kept = "mla_up_proj" not in self.recomputed or (self.saves_core and self.is_copied)
            width += key_width * is_kept * (2 if self.pads_values or self.is_copied else 1)
        elif self.extends_heads:
            query_width, key_width = heads * model.head_width, groups * model.head_width
            width += query_width + 2 * key_width
        elif model.qk_layernorm:
            # The norms' outputs; a fused norm copies the queries if several of them share a key.
            width += query_width + (0 if borrows else key_width + query_width * (heads > groups))
        # The output of the norm of values.
        width += key_width * (model.v_layernorm and not borrows)
        if self.saves_core and exchange == "all_gather":
            width += (model.context_parallel_size - 1) * 2 * key_width
        elif self.saves_core and exchange.startswith("a2a") and not model.mla.multi_latent_attention:
            num_ranks = model.context_parallel_size if exchange == "a2a" else model.cp_inner_size or 1
            width += ((copies_of_key_value_heads(heads, groups, num_ranks) or 1) - 1) * 2 * key_width
        return width * self.element

    @property
    def _rounds(self) -> bool:
        """Return whether linear layers save their inputs in FP8 or NVFP4."""
        model = self.model
        return model.fp8.is_in_float8(self.number, model.num_layers) and model.fp8.fp8_wgrad and not model.lora_rank

    @property
    def _recomputes_feed_forward(self) -> bool:
        return ("moe" if self.has_experts else "mlp") in self.recomputed

    def _saves_input(self, matrix: ChunkParameter, linear: str) -> bool:
        """Return whether a matrix's input is saved for a gradient: of its weight, or of its LoRA adapters."""
        return matrix.is_trained or (linear in self.model.adapted_parts and not self.model.lora_dropout)

    def _input(self, matrix: ChunkParameter, linear: str) -> int:
        if not self._saves_input(matrix, linear):
            return 0
        if not self._rounds or matrix.is_expert:
            return matrix.reads * self.element
        return int(matrix.reads * self.model.fp8.saved_element_bytes)

    def _of_attention_output(self, matrix: ChunkParameter) -> int:
        """Return the saved bytes of the attention's output, for its own backward pass and for the projection's."""
        own = matrix.reads * self.element * self.saves_core
        if self.pads_values:
            own = own * self.model.head_width // self.model.value_width
        is_same = not (self._rounds or self.is_copied or self.pads_values or self.model.attention_output_gate)
        of_projection = self._input(matrix, "linear_proj")
        return max(own, of_projection) if is_same else own + of_projection

    def _of_mlp(self, matrix: ChunkParameter, linear: str) -> int:
        writes = matrix.writes * self.element
        if linear == "linear_fc1":
            # A recomputed feed-forward layer needs its whole input.
            reads = matrix.reads * self.element if self._recomputes_feed_forward else self._input(matrix, linear)
            return reads * ("layernorm" not in self.recomputed) + writes * (not self._recomputes_feed_forward)
        return self._input(matrix, linear) * (not self._recomputes_feed_forward) + writes

    def _of_experts(self, matrix: ChunkParameter, linear: str) -> int:
        """Return the bytes saved because of a matrix of a MoE layer: router, latent projections or experts."""
        is_recomputed, element = self._recomputes_feed_forward, self.element
        if linear == "router":
            wide = element if self.model.moe.moe_router_dtype is None else max(element, 4)
            # The router's input, and the layer's, which the shared experts read too.
            reads = matrix.reads * (element if is_recomputed else wide) * ("layernorm" not in self.recomputed)
            return matrix.reads * element + reads + matrix.writes * 4 * (not is_recomputed)
        is_routed = matrix.is_expert
        if is_recomputed or ("shared_experts" in self.recomputed and not is_routed):
            return 0
        if linear == "fc1_latent_proj":
            # It reads the layer's input, and the dispatch copies its output.
            return self._input(matrix, linear) * self._rounds
        if linear == "linear_fc1":
            return self._input(matrix, linear) * (is_routed or self._rounds) + matrix.writes * element
        is_kept = not (is_routed and "moe_act" in self.recomputed)
        return self._input(matrix, linear) * is_kept + matrix.writes * element * is_routed


def kept_layer_bytes(model: GPTConfig, tokens: int, number: int, place: int) -> int:
    """Return the bytes that a layer saves with the configured recomputation; ``place`` is its index in its chunk.

    A layer of a multi-token prediction (MTP) module is alone, with index 0.
    """
    if model.recompute_granularity != "full":
        return saved_layer_bytes(model, tokens, number, model.recomputed_modules)
    length = model.recompute_num_layers or 1
    if number >= model.num_layers:
        # The hidden states before it and the embedded tokens.
        return 2 * _input_bytes(model, tokens)
    if model.recompute_method == "block":
        return _input_bytes(model, tokens) if place < length else saved_layer_bytes(model, tokens, number)
    return _input_bytes(model, tokens) if place % length == 0 else 0


def offloaded_bytes(config: RunConfig) -> int:
    """Return the most that a rank offloads to host memory: weights, and activations of the passes in flight."""
    model, most = config.model, 0
    for stage in range(model.pipeline_model_parallel_size):
        chunks = config.stage_layout.chunks(stage)
        first = [StageContents(chunk.layer_numbers[: model.num_offloaded_layers]) for chunk in chunks]
        weights = sum(parameter.size for chunk in first for parameter in chunk_parameters(model, chunk))
        weights *= ELEMENT_BYTES[model.params_dtype] * model.cpu_offloading_weights
        kept = [sum(_kept_by_offloaded(config, chunk)) for chunk in chunks]
        most = max(most, weights + most_of_chunks(config, stage, kept))
    return most


def least_offloaded_bytes(config: RunConfig) -> int:
    """Return the minimum that a rank offloads to host memory, the inputs of its layers in flight; needs no torch."""
    model, most = config.model, 0
    is_uniform = model.recompute_granularity == "full" and model.recompute_method != "block"
    length = (model.recompute_num_layers or 1) if is_uniform else 1
    for stage in range(model.pipeline_model_parallel_size if model.cpu_offloading_activations else 0):
        numbers = (chunk.layer_numbers[: model.num_offloaded_layers] for chunk in config.stage_layout.chunks(stage))
        inputs = [math.ceil(len(first) / length) for first in numbers]
        most = max(most, most_of_chunks(config, stage, inputs))
    return most * _input_bytes(model, tokens_of_rank(config))


def activation_bytes(config: RunConfig, rank: int) -> int:
    """Return the peak bytes of activations on a rank's device during a step, without the offloaded ones.

    In addition to the activations of micro-batches in flight, the device stores either the activations of one layer's
    backward pass, which are no more than the layer saves, or those of the loss. It also stores the layers being
    recomputed, and two layers that are being copied to the host.
    """
    model, stage = config.model, config.parallel_sizes.place(rank)["pp"]
    chunks, tokens = config.stage_layout.chunks(stage), tokens_of_rank(config)
    waiting = most_of_chunks(config, stage, [_kept_on_device(config, chunk) for chunk in chunks])
    numbers = [number for chunk in chunks for number in (*chunk.layer_numbers, *_mtp_layers(model, chunk))]
    largest = max((saved_layer_bytes(model, tokens, number) for number in numbers), default=0)
    is_grouped = model.recompute_granularity == "full" and model.recompute_method != "block"
    working, loss = largest * (model.recompute_num_layers or 1 if is_grouped else 1), 0
    if chunks[-1].has_loss:
        predictions = tokens * (1 + model.mtp.mtp_depth)
        element = ELEMENT_BYTES[model.params_dtype]
        loss = 2 * (1 + model.mtp.mtp_depth) * _input_bytes(model, tokens)
        loss += predictions * (model.padded_vocab_size // model.tensor_model_parallel_size) * (element + 8)
    moving = max(sum(sorted(_kept_by_offloaded(config, chunk))[-2:]) for chunk in chunks)
    return waiting + max(working, loss) + moving


def tokens_of_rank(config: RunConfig) -> int:
    """Return the tokens of a micro-batch per tensor-parallel group."""
    return config.data.seq_length // config.model.context_parallel_size * config.training.micro_batch_size


def most_of_chunks(config: RunConfig, stage: int, sizes: Sequence[int]) -> int:
    """Return the peak over the passes in flight of a stage, if each pass of its chunks saves ``sizes``."""
    model, parallel, layout = config.model, config.parallel_sizes, config.stage_layout
    num_microbatches = config.training.global_batch_size // (config.training.micro_batch_size * parallel.dp)
    group_size = model.microbatch_group_size_per_virtual_pipeline_stage
    actions = first_actions(
        config.pipeline_schedule, parallel.pp, stage, num_microbatches, layout.num_chunks, group_size
    )
    return most_in_flight(actions, sizes)


def _mtp_layers(model: GPTConfig, chunk: StageContents) -> range:
    """Return the layer numbers of the MTP modules in a chunk."""
    return range(model.num_layers, model.num_layers + model.mtp.mtp_depth * chunk.has_loss)


def _kept_on_device(config: RunConfig, chunk: StageContents) -> int:
    """Return the bytes that a chunk's layers save on the device per micro-batch; MTP layers are not offloaded."""
    model, tokens = config.model, tokens_of_rank(config)
    mtp = sum(kept_layer_bytes(model, tokens, number, 0) for number in _mtp_layers(model, chunk))
    return _kept_by(config, chunk) - sum(_kept_by_offloaded(config, chunk)) + mtp


def _kept_by_offloaded(config: RunConfig, chunk: StageContents) -> list[int]:
    """Return the saved bytes of each layer of a chunk whose activations are offloaded."""
    model, tokens = config.model, tokens_of_rank(config)
    numbers = chunk.layer_numbers[: model.num_offloaded_layers * model.cpu_offloading_activations]
    return [kept_layer_bytes(model, tokens, number, place) for place, number in enumerate(numbers)]


def _kept_by(config: RunConfig, chunk: StageContents) -> int:
    tokens = tokens_of_rank(config)
    return sum(
        kept_layer_bytes(config.model, tokens, number, place) for place, number in enumerate(chunk.layer_numbers)
    )


def _input_bytes(model: GPTConfig, tokens: int) -> int:
    """Return the bytes of a rank's hidden states of ``tokens`` tokens, as they are saved."""
    return hidden_bytes(model, tokens, is_sharded=model.sequence_parallel or model.distribute_saved_activations)


_MEGABYTE = 1024 * 1024
_Kind = tuple[bool, bool]
"""Whether a parameter belongs to an expert, and whether it is a matrix between the embeddings and the output layer."""


@dataclass(frozen=True)
class ModelSize:
    """Parameter counts of the whole model, and of one tensor-parallel rank of each pipeline stage.

    ``kinds`` counts the parameters with gradients and optimizer state (all, or only the low-rank adapters) in each
    shard, by whether they are replicated over the experts' data-parallel ranks, and whether they are matrices between
    the embeddings and the output layer. ``weight_bytes`` are the bytes of all weights of each shard.
    """

    block: int
    embedding: int
    shards: tuple[int, ...]
    kinds: tuple[Mapping[_Kind, int], ...]
    weight_bytes: tuple[int, ...]

    @property
    def trained(self) -> tuple[int, ...]:
        return tuple(sum(kinds.values()) for kinds in self.kinds)

    @property
    def experts(self) -> tuple[int, ...]:
        """Return the number of trained expert parameters per stage."""
        return tuple(sum(n for (is_expert, _), n in kinds.items() if is_expert) for kinds in self.kinds)


@dataclass(frozen=True)
class TheoreticalMemory:
    """Bytes on the most loaded rank; ``activations`` is None if no closed form applies."""

    weights_and_optimizer: float
    activations: float | None


def num_parameters(model: GPTConfig) -> int:
    """Count the parameters of a model on one rank."""
    whole = StageContents(tuple(range(model.num_layers)), has_embedding=True, has_loss=True)
    return _count(_on_one_rank(model), whole)


def _on_one_rank(model: GPTConfig) -> GPTConfig:
    return dataclasses.replace(
        model,
        tensor_model_parallel_size=1,
        sequence_parallel=False,
        expert_model_parallel_size=1,
        expert_tensor_parallel_size=None,
    )


def model_size(config: RunConfig) -> ModelSize:
    """Count the parameters of a configuration's model, with replicas counted once."""
    model, layout = config.model, config.stage_layout
    whole = _on_one_rank(model)
    block = StageContents(tuple(range(model.num_layers)), has_embedding=False, has_loss=False)
    # A tied output layer is counted with the embedding whose weight it shares.
    ends = StageContents((), has_embedding=True, has_loss=True)
    rows = model.padded_vocab_size - whole.padded_vocab_size
    plain = with_fields(whole, mtp_num_layers=None)
    num_norm = sum(each.size for each in chunk_parameters(plain, ends) if ".final_layernorm." in each.name)
    embedding = _count(plain, ends) - num_norm
    further = _count(whole, ends) - _count(plain, ends)
    embedding += rows * model.hidden_size * (2 if model.untie_embeddings_and_output_weights else 1)
    stages = [layout.chunks(rank) for rank in range(model.pipeline_model_parallel_size)]
    shards = (sum(_count(model, chunk) for chunk in chunks) for chunks in stages)
    kinds = (_count_by_kind(model, chunks) for chunks in stages)
    element = ELEMENT_BYTES[model.params_dtype]
    weight_bytes = (
        sum(each.num_bytes(element) for chunk in chunks for each in chunk_parameters(model, chunk)) for chunks in stages
    )
    rest = num_norm + further
    return ModelSize(_count(whole, block) + rest, embedding, tuple(shards), tuple(kinds), tuple(weight_bytes))


def theoretical_memory(config: RunConfig) -> TheoreticalMemory:
    """Return the bytes of weights, gradients, optimizer state and activations on the most loaded rank."""
    size = model_size(config)
    sizes = config.parallel_sizes
    replicas = {False: sizes.num_replicas, True: sizes.num_expert_replicas}
    weights = max(
        of_weights
        + sum(
            number * _bytes_a_trained_parameter(config, replicas[is_expert], is_matrix=is_matrix)
            for (is_expert, is_matrix), number in kinds.items()
        )
        for of_weights, kinds in zip(size.weight_bytes, size.kinds)
    )
    return TheoreticalMemory(weights, _activation_bytes(config))


def describe_theoretical_memory(config: RunConfig) -> list[str]:
    """Return Megatron's lines on the parameter counts and on the memory of the most loaded rank."""
    size, memory = model_size(config), theoretical_memory(config)
    *others, most = sorted(size.shards)
    lines = [
        f"Number of parameters in transformer block in billions: {size.block / 1e9: .2f}",
        f"Number of parameters in embedding layers in billions: {size.embedding / 1e9:.2f}",
        f"Total number of parameters in billions: {(size.block + size.embedding) / 1e9:.2f}",
        f"Number of parameters in most loaded shard in billions: {most / 1e9:.4f}",
    ]
    if others:
        lines.append(f"Number of parameters in other shards in billions: {others[-1] / 1e9:.4f}")
    weights = memory.weights_and_optimizer / _MEGABYTE
    line = f"Theoretical memory footprints: weight and optimizer={weights:.2f} MB"
    if memory.activations is not None:
        activations = memory.activations / _MEGABYTE
        line += f", activation={activations:.2f} MB, total={weights + activations:.2f} MB"
    return [*lines, line]


def _count(model: GPTConfig, chunk: StageContents) -> int:
    return sum(parameter.size for parameter in chunk_parameters(model, chunk))


def _count_by_kind(model: GPTConfig, chunks: Iterable[StageContents]) -> Mapping[_Kind, int]:
    found: Counter[_Kind] = Counter()
    for chunk in chunks:
        for each in chunk_parameters(model, chunk):
            found[each.is_expert, each.is_matrix] += each.size * each.is_trained
    return found


def _bytes_a_trained_parameter(config: RunConfig, replicas: int, *, is_matrix: bool = False) -> float:
    """Return the bytes of a gradient, plus the main parameter and moments, minus the weight's bytes on other shards."""
    ddp = config.ddp
    gradient: float = ELEMENT_BYTES[ddp.grad_dtype(config.model.params_dtype)]
    state: float = state_bytes(config.optimizer, is_matrix=is_matrix)
    if ddp.shards_over(replicas):
        replicas = ddp.num_shards(replicas)
        state /= replicas
        gradient /= replicas if ddp.shards_gradients else 1
        if ddp.shards_weights:
            # Subtract the part of the weight on other shards, because the full weight is counted for every parameter.
            gradient -= ELEMENT_BYTES[config.model.params_dtype] * (1 - 1 / replicas)
    return gradient + state


def _activation_bytes(config: RunConfig) -> float | None:
    """Return the bytes that the first stage saves for its backward passes.

    The result is None if the tensor-parallel ranks store replicas, if the layers recompute all their activations, in
    MoE models, or if the closed form does not cover the model's layers.
    """
    model, sizes = config.model, config.parallel_sizes
    has_copies = sizes.tp > 1 and not model.sequence_parallel
    is_unplanned = model.moe.num_experts or model.mla.multi_latent_attention or model.mtp.mtp_depth
    if has_copies or model.recompute_granularity != "selective" or is_unplanned:
        return None
    element, h = ELEMENT_BYTES[model.params_dtype], model.hidden_size
    tokens = tokens_of_rank(config)
    chunks = config.stage_layout.chunks(0)
    layers = (number for chunk in chunks for number in chunk.layer_numbers)
    kept = sum(saved_layer_bytes(model, tokens, number, model.recomputed_modules) for number in layers)
    per_microbatch = tokens * element * h / sizes.tp + kept
    num_microbatches = config.training.global_batch_size // (config.training.micro_batch_size * sizes.dp)
    in_flight: float = min(sizes.pp, num_microbatches)
    if len(chunks) > 1:
        # An interleaved schedule has more warmup passes.
        in_flight = sizes.pp * (1 + (sizes.pp - 1) / (sizes.pp * len(chunks)))
    total = per_microbatch * in_flight
    if sizes.pp == 1:
        # The inputs of the last norm and of the output layer, and the logits in float32.
        inputs = 1 if model.lora_rank else 2
        num_logits = tokens * model.padded_vocab_size / sizes.tp
        if model.cross_entropy_fusion_impl == "linear":
            num_logits = chunk_rows(tokens, model.padded_vocab_size // sizes.tp) * model.padded_vocab_size / sizes.tp
        total += tokens * inputs * element * h / sizes.tp + 4 * num_logits
    return total
