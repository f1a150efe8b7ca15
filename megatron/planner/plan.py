"""The plan: a model, its layout over ranks and its batches, with the work of its layers.

A plan does not depend on a particular run. Layers are grouped by kind, since memory and time follow from the kind
alone.

MoE layers assume a balanced load. A rank routes a part of the tokens of its tensor-parallel group. Each token is sent
to each of its experts, and to each rank that shards an expert; as many rows are received as are sent. The terms are
those of docs/mixture_of_experts.md.

FLOPs of a step are counted in two ways: those that the model needs, and those that Megatron-LM counts for its TFLOP/s.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from megatron.core.config_base import with_fields
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.models.gpt import GPTConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.parallel_config import ELEMENT_BYTES, ParallelSizes
from megatron.core.pipeline_parallel import Action, StageContents, StageLayout, first_actions, most_passes_in_flight
from megatron.core.transformer import INDEPENDENT_SCORES, MOE, LayerParts

if TYPE_CHECKING:
    from megatron.config import RunConfig
    from megatron.core.transformer import DecoderConfig


class LayerKind(NamedTuple):
    """Properties of a layer on which its memory and time depend.

    ``in_float8`` says whether its matmuls are in FP8. ``window`` is the number of keys that a query attends to at most,
    including its own. ``has_rotary`` is false if --no-rope-freq removes the rotary embedding. ``exchange`` is the
    context-parallel communication type. ``is_global`` is set for a layer without a window if layers without a window
    have another shape of attention. ``is_further`` is set for the layer of an MTP module, ``has_indexer`` for a layer
    with an indexer of DSA, and ``borrows`` for a layer that uses the keys and values of another layer.
    """

    in_float8: bool
    parts: LayerParts
    window: int
    has_rotary: bool
    exchange: str
    is_global: bool = False
    is_further: bool = False
    has_indexer: bool = False
    borrows: bool = False

    @property
    def has_experts(self) -> bool:
        return self.parts.feed_forward == MOE

    @property
    def order(self) -> tuple[object, ...]:
        """Return the key by which kinds are ordered; a part that a layer lacks comes first."""
        return self.in_float8, tuple(part or "" for part in self.parts), *self[2:]

    def shape(self, model: GPTConfig) -> GPTConfig:
        """Return the model's configuration with the shape of this layer's attention."""
        return model.of_global_layers if self.is_global else model.of_windowed_layers


DEEPEP_AS_ALLTOALL = (
    "--moe-token-dispatcher-type flex: DeepEP is predicted as alltoall, which sends a token once per expert instead of "
    "once per rank"
)
"""Note on the predictions of a model whose tokens DeepEP exchanges."""


def layer_kinds(model: GPTConfig, seq_length: int) -> Sequence[LayerKind]:
    """Return the kind of every layer; the layers of MTP modules come last."""
    exchanges = model.cp_comm_type if model.context_parallel_size > 1 else ("",)
    float8_layers = tuple(model.fp8.float8_layers(model.num_layers))
    without_rotary = model.layers_without_rotary
    borrows = tuple(source is not None for source in model.key_value_sources)
    of_layers = model.layer_parts, model.layer_windows, without_rotary, borrows, model.layers_with_indexer
    own = _kinds(float8_layers, *of_layers, tuple(exchanges), seq_length, model.has_global_shape)
    further = own[model.kind_of(model.num_layers)]._replace(
        parts=model.parts_of(model.num_layers),
        in_float8=model.fp8.is_in_float8(model.num_layers, model.num_layers),
        is_further=True,
        has_indexer=model.has_sparse_attention,
    )
    return [*own, *[further] * model.mtp.mtp_depth] if model.mtp.mtp_depth else own


def layer_numbers(model: GPTConfig, chunk: StageContents) -> tuple[int, ...]:
    """Return the numbers of a chunk's layers; the layers of MTP modules come last."""
    further = model.mtp.mtp_depth if chunk.has_loss else 0
    return (*chunk.layer_numbers, *range(model.num_layers, model.num_layers + further))


# A search repeats the same layers thousands of times.
@functools.lru_cache(maxsize=1024)
def _kinds(
    float8_layers: tuple[int, ...],
    layer_parts: tuple[LayerParts, ...],
    windows: tuple[int | None, ...],
    without_rotary: tuple[bool, ...],
    borrows: tuple[bool, ...],
    with_indexer: tuple[bool, ...],
    exchanges: tuple[str, ...],
    seq_length: int,
    has_global: bool,
) -> Sequence[LayerKind]:
    return [
        LayerKind(
            in_float8=number in float8_layers,
            parts=parts,
            window=min(window or seq_length, seq_length),
            has_rotary=not is_without,
            exchange=exchanges[0 if len(exchanges) == 1 else number],
            is_global=has_global and window is None,
            has_indexer=with_indexer[number],
            borrows=is_borrowing,
        )
        for number, (parts, window, is_without, is_borrowing) in enumerate(
            zip(layer_parts, windows, without_rotary, borrows, strict=True)
        )
    ]


_INDEX = 8
_ROUTER_BYTES = {None: 0, "fp32": 4, "fp64": 8}


@dataclass(frozen=True)
class ExpertLayer:
    """Work of an MoE layer for one micro-batch on one rank.

    ``tokens`` is the number of tokens of the tensor-parallel group, from ``sequences`` samples. ``element`` is the
    element size of the model's dtype in bytes.
    """

    model: DecoderConfig
    tokens: int
    sequences: int
    element: int

    @functools.cached_property
    def sizes(self) -> ParallelSizes:
        """Return the parallel sizes; only those of one model copy matter here."""
        return self.model.parallel_sizes

    @property
    def num_ranks(self) -> int:
        return self.sizes.ep * self.sizes.expert_tp

    @property
    def axes(self) -> tuple[str, ...]:
        """Return the grid axes of the expert-parallel ranks."""
        return ("ep", "etp") if self.sizes.has_expert_grid else ("tp",)

    @property
    def rows(self) -> int:
        """Return the number of rows that a rank routes, including padding."""
        return -(-self.tokens // self.sizes.tp)

    @property
    def choices(self) -> int:
        """Return the number of rows that a rank sends, which is also the number that it receives."""
        factor = min(self.model.moe.moe_expert_capacity_factor or 1.0, 1.0)
        return round(self.rows * self.model.moe.moe_router_topk * self.sizes.expert_tp * factor)

    @property
    def given(self) -> int:
        """Return the number of rows that the experts of a rank compute, including padding."""
        model, factor = self.model, self.model.moe.moe_expert_capacity_factor
        if factor is None or not model.moe.moe_pad_expert_input_to_capacity:
            return self.choices
        whole = self.tokens * self.sizes.cp
        capacity = min(math.ceil(whole * model.moe.moe_router_topk / self.num_experts * factor), whole)
        return self.num_ranks * min(capacity, self.rows) * self.num_local

    @property
    def num_experts(self) -> int:
        """Return the number of experts of the layer."""
        assert self.model.moe.num_experts is not None, "a dense layer was asked for its experts"
        return self.model.moe.num_experts

    @property
    def num_local(self) -> int:
        """Return the number of experts on this rank, full or sharded."""
        return self.num_experts // self.sizes.ep

    @property
    def width(self) -> int:
        return self.model.moe.moe_ffn_hidden_size // self.sizes.expert_tp

    @property
    def shared_width(self) -> int:
        """Return the width of this rank's shard of the shared expert, or 0 without a shared expert."""
        return (self.model.moe.moe_shared_expert_intermediate_size or 0) // self.sizes.tp

    @property
    def gates(self) -> int:
        """Return the output width of an expert's first linear layer, as a multiple of the expert's width."""
        return 2 if self.model.is_gated else 1

    @property
    def wide(self) -> int:
        return max(self.router_element, 4)

    @property
    def router_element(self) -> int:
        return max(self.element, _ROUTER_BYTES[self.model.moe.moe_router_dtype])

    @property
    def weight_element(self) -> int:
        """Return the bytes of a routing weight that scales an expert's output."""
        return self.element if self.model.moe.moe_router_dtype is None else self.wide

    @property
    def at_work(self) -> int:
        """Return the elements that the backward pass needs in addition to the activations that are still saved."""
        h, width = self.model.expert_input_size, self.width
        # Gradients of the expert outputs, several copies while they are permuted; then gradients of the linear layers.
        copies = 2 if self._is_sent and self.num_ranks > 1 else 1
        experts = max(copies * self.choices * h, self.given * width, self.given * (self.gates * width - h))
        return max(experts, self.tokens * self.shared_width * (self.gates + 1))

    def kept(self, *, shared_keeps: bool = True) -> Mapping[str, int]:
        """Return the saved activations of the layer by part, without its input.

        ``shared_keeps`` says whether the second linear layer of the shared expert saves its input.
        """
        h, e, modules = self.model.hidden_size, self.element, self.model.recomputed_modules
        of_expert = self.model.expert_input_size
        shared = self.tokens * self.shared_width * (self.gates + shared_keeps) * e
        if "shared_experts" in modules:
            shared = 0
        elif self.model.moe.moe_shared_expert_gate:
            rows = self.rows if self.model.sequence_parallel else self.tokens
            shared += rows * (h + 1) * e
        return {
            "router": self._router(),
            "experts' inputs": self.given * of_expert * self._keeps("linear_fc1") * e,
            "experts": self.given
            * self.width
            * (self.gates + ("moe_act" not in modules) * self._keeps("linear_fc2"))
            * e,
            "experts' adapters": self.given * self._adapter_width * e,
            "experts' outputs": self.choices * of_expert * e,
            "latent sums": self.rows * (self.model.moe.moe_latent_size or 0) * (not self.model.lora_rank) * e,
            "shared expert": shared,
            "places of tokens": self._places(),
        }

    def _keeps(self, name: str) -> bool:
        """Return whether the experts' linear layer saves its input, for a gradient of its weights or adapters."""
        return not self.model.lora_rank or name in self.model.adapted_parts

    @property
    def _adapter_width(self) -> int:
        """Return the total rank of the experts' adapters, whose low-rank activations are saved."""
        if not self.model.lora_rank:
            return 0
        parts = (self.model.adapted_parts.get(name, ()) for name in ("linear_fc1", "linear_fc2"))
        return self.model.lora_rank * sum(map(len, parts))

    def _router(self) -> int:
        """Return the bytes that scores, routing weights and losses save."""
        model, rows, k = self.model, self.rows, self.model.moe.moe_router_topk
        of_scores, of_weights = rows * self.num_experts * self.wide, rows * k * self.wide
        kept = 0
        if self.router_element != self.element:
            kept += (rows + self.num_experts) * model.hidden_size * self.router_element
        function = model.moe.moe_router_score_function
        is_softmax = function not in INDEPENDENT_SCORES
        if function == "sparsemixer":
            kept += k * rows * self.num_experts * (self.wide + 1)
        elif is_softmax and not model.moe.moe_router_pre_softmax:
            kept += of_weights
        else:
            kept += of_scores
            kept += 0 if is_softmax or k == 1 else of_weights + rows * self.wide
            # The backward pass of softplus reads the logits, which the z-loss saves too.
            kept += of_scores if function == "sqrtsoftplus" and not model.moe.moe_z_loss_coeff else 0
        kept += (rows * k * self.sizes.expert_tp if self._is_sent else self._gathered * k) * self.weight_element
        if model.moe.moe_aux_losses:
            kept += of_scores + (0 if is_softmax else rows * self.wide)
        if model.moe.moe_z_loss_coeff:
            kept += of_scores + rows * self.wide
        return kept

    def _places(self) -> int:
        """Return the bytes of the saved integer indices of the token permutation."""
        choices = self.rows * self.model.moe.moe_router_topk
        places = choices + (self.rows if self.model.moe.moe_aux_losses else 0)
        if not self._is_sent:
            return _INDEX * (places + self._gathered * self.model.moe.moe_router_topk + self.choices)
        places += choices * self.sizes.expert_tp + self.choices
        return _INDEX * (places + (2 * self.choices if self.num_ranks > 1 else 0))

    @property
    def _is_sent(self) -> bool:
        return self.model.moe.moe_token_dispatcher_type != "allgather"

    @property
    def _gathered(self) -> int:
        return self.rows * self.num_ranks

    @property
    def moved_rows(self) -> tuple[int, int]:
        """Return the reads and writes per sent row between GEMMs and exchanges, forward and backward."""
        return (9, 18) if self._is_sent and self.num_ranks > 1 else (5, 10)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Configuration on which memory and time depend, with consistent parts."""

    model: GPTConfig
    ddp: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    parallel_sizes: ParallelSizes
    stage_layout: StageLayout
    pipeline_schedule: str
    seq_length: int
    micro_batch_size: int
    global_batch_size: int
    uses_cuda_graphs: bool = False
    captures_loss: bool = False

    @staticmethod
    def of(config: RunConfig, stage_layout: StageLayout | None = None) -> Plan:
        """Return the plan of a run's configuration; ``stage_layout`` is the configuration's own, if it is known."""
        return Plan(
            model=config.model,
            ddp=config.ddp,
            optimizer=config.optimizer,
            parallel_sizes=config.parallel_sizes,
            stage_layout=stage_layout or config.stage_layout,
            pipeline_schedule=config.pipeline_schedule,
            seq_length=config.data.seq_length,
            micro_batch_size=config.training.micro_batch_size,
            global_batch_size=config.training.global_batch_size,
            uses_cuda_graphs=config.training.cuda_graph_impl == "local",
            captures_loss=config.training.loss_cuda_graph,
        )

    @property
    def num_microbatches(self) -> int:
        return self.global_batch_size // (self.micro_batch_size * self.parallel_sizes.dp)

    @property
    def num_tokens(self) -> int:
        """Return the tokens of a micro-batch on a rank, s/c · b."""
        return self.seq_length // self.parallel_sizes.cp * self.micro_batch_size

    @property
    def num_rows(self) -> int:
        """Return the rows of the residual stream of a micro-batch on a rank."""
        return self.num_tokens // self.parallel_sizes.tp if self.model.sequence_parallel else self.num_tokens

    @property
    def message_bytes(self) -> int:
        """Return the bytes of a message between pipeline stages, for one micro-batch."""
        return self.num_rows * sum(self.model.message_widths) * ELEMENT_BYTES[self.model.params_dtype]

    @property
    def num_logits(self) -> int:
        """Return the logits of a micro-batch on a rank of the last stage, including those of MTP modules."""
        return self.num_predictions * (self.model.padded_vocab_size // self.parallel_sizes.tp)

    @property
    def num_predictions(self) -> int:
        """Return the number of predicted tokens of a micro-batch on a rank, including those of MTP modules."""
        return self.num_tokens * (1 + self.model.mtp.mtp_depth)

    def warm_up_actions(self, stage: int) -> Sequence[Action]:
        """Return a stage's actions of one step, limited to the first rounds of micro-batches."""
        return first_actions(*self._schedule(stage))

    def most_passes_in_flight(self, stage: int) -> int:
        """Return the maximum number of forward passes of a stage that wait for their backward passes."""
        return most_passes_in_flight(*self._schedule(stage))

    def _schedule(self, stage: int) -> tuple[str, int, int, int, int, int | None]:
        """Return the arguments of `first_actions` for a stage."""
        group_size = self.model.microbatch_group_size_per_virtual_pipeline_stage
        pp, num_chunks = self.parallel_sizes.pp, self.stage_layout.num_chunks
        return self.pipeline_schedule, pp, stage, self.num_microbatches, num_chunks, group_size


def megatron_step_flops(plan: Plan) -> float:
    """Return the FLOPs per step as Megatron-LM counts them for its TFLOP/s: attention without the causal mask."""
    return plan.global_batch_size * _megatron_flops(plan.model, plan.seq_length)


def step_flops(plan: Plan) -> float:
    """Return the FLOPs per step that the model needs, without masked attention scores."""
    return 3.0 * plan.global_batch_size * _forward_flops(plan.model, plan.seq_length)


# A search repeats the same models thousands of times.
@functools.lru_cache(maxsize=64)
def _forward_flops(model: GPTConfig, s: int) -> float:
    return model.forward_flops_per_sequence(s)


@functools.lru_cache(maxsize=64)
def _megatron_flops(model: GPTConfig, s: int) -> float:
    # Windows longer than the sequence, because layers without a window may have another shape of attention.
    causal = dataclasses.replace(model, window_size=f"{s - 1},0") if model.window_size else model
    if model.has_sparse_attention:
        causal = with_fields(causal, dsa_indexer_topk=s, dsa_indexer_loss_coeff=0.0)
    unused_half = 0.0
    for number in range(model.num_layers + model.mtp.mtp_depth):
        own = model.of_layer(number)
        of_scores = 2 * own.query_projection_size
        if model.mla.multi_latent_attention:
            of_scores = model.num_attention_heads * (model.mla.latent_query_width + model.mla.v_head_dim)
        unused_half += 1.0 * s * s * of_scores * model.parts_of(number).has_attention
    return 3.0 * (_forward_flops(causal, s) + unused_half)
