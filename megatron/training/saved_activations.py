"""The activations that a transformer layer saves for its backward pass, from what its matrices read and write.

Counted are the matrices of the layer that the code builds, and the few tensors that are no input or output of a matrix:
copies of context parallelism, and what the norms of queries and keys save. Left out are a few numbers per token.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from megatron.core.context_parallel.key_value_heads import copies_of_key_value_heads, key_value_heads_of_rank
from megatron.core.model_parallel_config import ELEMENT_BYTES
from megatron.core.models.gpt.chunk_parameters import ChunkParameter, chunk_parameters
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.stage_layout import StageContents

_READ_FIRST_NORM = ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj")
"""Linear layers of an attention whose input is the output of the norm in front of it."""
_UP_PROJECTIONS = ("linear_q_proj", "linear_q_up_proj", "linear_kv_up_proj")
"""Linear layers of multi-head latent attention (MLA) whose outputs --recompute-modules mla_up_proj computes again."""
_JOINED = 5
"""Hidden states that a multi-token prediction (MTP) module saves besides its layer: the inputs of three norms,
and the two that it concatenates."""


def saved_layer_bytes(model: GPTConfig, tokens: int, number: int, recomputed: Collection[str] = ()) -> int:
    """Return what a layer saves of a micro-batch of so many tokens of the tensor-parallel group.

    ``recomputed`` are the modules of --recompute-modules that are computed again. Layers from ``num_layers`` on belong
    to the MTP modules.
    """
    layer, sizes = _Layer(model, number, frozenset(recomputed)), model.parallel_sizes
    # A balanced load gives each rank's experts their share of the choices.
    choices = tokens * model.moe_router_topk * sizes.expert_tp // sizes.tp
    saved = sum(
        (choices if each.is_expert else tokens) * layer.bytes_per_token(each)
        for each in chunk_parameters(model, StageContents((number,)))
    )
    saved += tokens * layer.bytes_without_matrices()
    num_hidden = _JOINED * (number >= model.num_layers) + 2 * (model.norm_placement not in ("before", "after"))
    return saved + num_hidden * hidden_bytes(model, tokens, is_sharded=model.sequence_parallel)


def hidden_bytes(model: GPTConfig, tokens: int, *, is_sharded: bool) -> int:
    """Return the bytes of the hidden states of so many tokens on a rank, whole or sharded by tensor parallelism."""
    rows = tokens // (model.tensor_model_parallel_size if is_sharded else 1)
    return rows * model.hidden_size * ELEMENT_BYTES[model.params_dtype]


@dataclass(frozen=True)
class _Layer:
    """Say of a layer's matrices which of their inputs and outputs are saved."""

    model: GPTConfig
    number: int
    recomputed: frozenset[str]

    @property
    def element(self) -> int:
        """Return the bytes of an element of the model's type."""
        return ELEMENT_BYTES[self.model.params_dtype]

    @property
    def has_experts(self) -> bool:
        """Return whether the feed-forward is one of experts."""
        return self.model.moe_layers[self.model.kind_of(self.number)]

    @property
    def saves_core(self) -> bool:
        """Return whether the core of the attention saves its inputs and its output."""
        return "core_attn" not in self.recomputed

    @property
    def cp_exchange(self) -> str:
        """Return how context-parallel ranks exchange keys and values; empty for one rank."""
        return self.model.cp_exchange(self.model.kind_of(self.number)) if self.model.context_parallel_size > 1 else ""

    @property
    def is_copied(self) -> bool:
        """Return whether context parallelism copies queries, keys and values."""
        return self.cp_exchange not in ("", "p2p")

    @property
    def pads_values(self) -> bool:
        """Return whether the values of MLA are padded to the width of its keys."""
        return self.model.multi_latent_attention and self.model.v_head_dim < self.model.latent_head_width

    def bytes_per_token(self, matrix: ChunkParameter) -> int:
        """Return what is saved of a matrix's input and output per token that it computes."""
        name, _, adapter = matrix.name.partition(".adapters.")
        linear = name.removesuffix(".weight").rpartition(".")[2]
        if adapter:
            # An adapter reads what its layer reads, unless dropout makes a copy, and the layer adds what it writes.
            is_first = adapter.endswith("lora_A")
            reads = matrix.reads * (self.model.lora_dropout > 0.0)
            is_recomputed = name.startswith("mlp.") and self._recomputes_feed_forward
            return (matrix.writes + reads) * self.element * is_first * (not is_recomputed)
        if name.startswith("mlp."):
            return (self._of_experts if self.has_experts else self._of_mlp)(matrix, linear)
        writes = matrix.writes * self.element
        if self.model.multi_latent_attention and linear in _UP_PROJECTIONS and "mla_up_proj" in self.recomputed:
            writes = 0
        if linear == "linear_kv_up_proj" and (self.pads_values or self.is_copied):
            writes = 0
        if linear == "linear_proj":
            return self._of_attention_output(matrix) + writes
        if linear not in _READ_FIRST_NORM:
            return self._input(matrix, linear) + writes
        # The two down-projections of MLA read the same.
        is_counted = "layernorm" not in self.recomputed and (linear != "linear_kv_down_proj" or self._rounds)
        return self._input(matrix, linear) * is_counted + writes

    def bytes_without_matrices(self) -> int:
        """Return what the attention saves per token that is no matrix's input or output."""
        model, tp = self.model, self.model.tensor_model_parallel_size
        heads, groups = model.num_attention_heads // tp, key_value_heads_of_rank(model.num_query_groups, tp)
        exchange, query_width, key_width = self.cp_exchange, heads * model.kv_channels, groups * model.kv_channels
        width = 0
        if model.multi_latent_attention:
            # Keys are joined with their rotary part; values are padded to the width of keys, or copied.
            key_width = heads * model.latent_head_width
            is_kept = "mla_up_proj" not in self.recomputed or (self.saves_core and self.is_copied)
            width += key_width * is_kept * (2 if self.pads_values or self.is_copied else 1)
        elif model.qk_layernorm:
            # The norms' outputs; a fused norm copies queries of which several share a key.
            width += query_width + key_width + query_width * (heads > groups)
        if self.saves_core and exchange == "all_gather":
            width += (model.context_parallel_size - 1) * 2 * key_width
        elif self.saves_core and exchange.startswith("a2a") and not model.multi_latent_attention:
            num_ranks = model.context_parallel_size if exchange == "a2a" else model.cp_inner_size or 1
            width += ((copies_of_key_value_heads(heads, groups, num_ranks) or 1) - 1) * 2 * key_width
        return width * self.element

    @property
    def _rounds(self) -> bool:
        """Return whether linear layers save their inputs in fp8."""
        model = self.model
        return model.is_in_float8(self.number, model.num_layers) and model.fp8_wgrad and not model.lora_rank

    @property
    def _recomputes_feed_forward(self) -> bool:
        return ("moe" if self.has_experts else "mlp") in self.recomputed

    def _saves_input(self, matrix: ChunkParameter, linear: str) -> bool:
        """Return whether a matrix's input is saved for a gradient: of its weight, or of its LoRA adapters."""
        return matrix.is_trained or (linear in self.model.adapted_parts and not self.model.lora_dropout)

    def _input(self, matrix: ChunkParameter, linear: str) -> int:
        if not self._saves_input(matrix, linear):
            return 0
        return matrix.reads * (1 if self._rounds and not matrix.is_expert else self.element)

    def _of_attention_output(self, matrix: ChunkParameter) -> int:
        """Return what is saved of the attention's output: for its own backward pass, and for the projection's."""
        own = matrix.reads * self.element * self.saves_core
        if self.pads_values:
            own = own * self.model.latent_head_width // self.model.v_head_dim
        is_same = not (self._rounds or self.is_copied or self.pads_values)
        of_projection = self._input(matrix, "linear_proj")
        return max(own, of_projection) if is_same else own + of_projection

    def _of_mlp(self, matrix: ChunkParameter, linear: str) -> int:
        writes = matrix.writes * self.element
        if linear == "linear_fc1":
            # A feed-forward that is computed again is computed from its whole input.
            reads = matrix.reads * self.element if self._recomputes_feed_forward else self._input(matrix, linear)
            return reads * ("layernorm" not in self.recomputed) + writes * (not self._recomputes_feed_forward)
        return self._input(matrix, linear) * (not self._recomputes_feed_forward) + writes

    def _of_experts(self, matrix: ChunkParameter, linear: str) -> int:
        """Return what is saved because of a matrix of a layer of experts: router, shared or routed experts."""
        is_recomputed, element = self._recomputes_feed_forward, self.element
        if linear == "router":
            wide = element if self.model.moe_router_dtype is None else max(element, 4)
            # The layer's output, and its input, which shared experts read too.
            reads = matrix.reads * (element if is_recomputed else wide) * ("layernorm" not in self.recomputed)
            return matrix.reads * element + reads + matrix.writes * 4 * (not is_recomputed)
        is_routed = matrix.is_expert
        if is_recomputed or ("shared_experts" in self.recomputed and not is_routed):
            return 0
        if linear == "linear_fc1":
            return self._input(matrix, linear) * (is_routed or self._rounds) + matrix.writes * element
        is_kept = not (is_routed and "moe_act" in self.recomputed)
        return self._input(matrix, linear) * is_kept + matrix.writes * element * is_routed
