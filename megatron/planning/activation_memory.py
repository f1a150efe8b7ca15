"""What a transformer layer keeps for its backward pass, in bytes, before anything runs.

Kept are tensors that autograd saves, each piece of memory once. Parameters are left out, and what is of the micro-batch
and shared by layers: positions, masks, angles, keys of dropout. The forms are exact for the fused kernels: attention
that keeps no weights, norms that keep a scale (and a mean) a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.context_parallel.head_sharing import key_value_heads_of_rank
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.action import Pass
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planning.chunk_parameters import chunk_parameters
from megatron.planning.closed_forms import ELEMENT_BYTES
from megatron.planning.plan import Plan

if TYPE_CHECKING:
    from megatron.training.config.run_config import RunConfig


SavedBytes = Callable[[GPTConfig, int, int], Mapping[str, int]]
"""Return by part what a layer keeps of a micro-batch, from (model, sequence length, micro-batch size)."""


@dataclass(frozen=True)
class LayerBytes:
    """Hold what one layer keeps of one micro-batch: as configured, and without any recompute.

    With full recompute ``kept`` is what the first layer of each group keeps.
    """

    kept: int
    whole: int


def saved_bytes(config: TransformerConfig, seq_length: int, micro_batch_size: int) -> Mapping[str, int]:
    """Return by part what one layer keeps of one micro-batch on one rank, with the recompute that is configured.

    With full recompute only ``stream`` is left, which the first layer of each group keeps.
    """
    tp, element = config.tensor_model_parallel_size, ELEMENT_BYTES[config.params_dtype]
    tokens = seq_length // config.context_parallel_size * micro_batch_size
    rows = tokens // tp if config.sequence_parallel else tokens
    hidden = rows * config.hidden_size * element
    if config.recompute_granularity == "full":
        return {"stream": hidden // tp if config.distribute_saved_activations else hidden}
    wide = max(element, 4)
    width, heads = config.kv_channels, config.num_attention_heads // tp
    groups = key_value_heads_of_rank(config.num_query_groups, tp)
    ffn = config.ffn_hidden_size // tp
    modules = config.recomputed_modules
    num_norms = 0 if config.norm_placement == "after" else 2
    parts = {
        # In front of each norm: its sum, and numbers a token.
        "stream": 2 * hidden,
        "norm numbers": num_norms * rows * wide * (2 if config.normalization == "LayerNorm" else 1),
        "norm outputs": 0 if "layernorm" in modules else num_norms * hidden,
        "query, key, value": tokens * (heads + 2 * groups) * width * element,
        "attention numbers": 0 if "core_attn" in modules else tokens * heads * wide,
        "attention output": tokens * heads * width * element,
        "feed-forward": 0 if "mlp" in modules else tokens * ffn * (3 if config.is_gated else 2) * element,
    }
    return {name: size for name, size in parts.items() if size}


def offloaded_bytes(config: RunConfig) -> int:
    """Return the most that a rank leaves in the machine's memory: weights, and activations of what is in flight."""
    model, most = config.model, 0
    plan = Plan.of(config)
    layer = layer_bytes(plan)
    for stage in range(model.pipeline_model_parallel_size):
        chunks = config.stage_layout.chunks(stage)
        weights = sum(_weights_by_chunk(model, chunk) for chunk in chunks) if model.cpu_offloading_weights else 0
        sizes = [_kept_by_first(model, _num_offloaded(model, chunk), layer) for chunk in chunks]
        most = max(most, weights + _most_in_flight(plan, stage, sizes))
    return most


def activation_bytes(config: RunConfig, rank: int) -> int:
    """Return the bytes of activations on a rank's device at the fullest moment of a training step.

    Counted are what the layers keep of what is in flight, but for what is offloaded; what is computed again, and two
    layers' on their way to the machine's memory or back; and on the stage that has them the last norm's input and
    output and the logits of one micro-batch, once in the model's type and twice in float32.
    """
    plan = Plan.of(config)
    stage = plan.parallel_sizes.place(rank)["pp"]
    total = sum(activation_parts(plan, stage, layer_bytes(plan)))
    if plan.stage_layout.contents(stage, -1).has_loss:
        total += plan.num_logits * (ELEMENT_BYTES[plan.model.params_dtype] + 8)
    return total


def layer_bytes(plan: Plan, saved: SavedBytes = saved_bytes) -> LayerBytes:
    """Return what one layer keeps of one micro-batch, with the recompute that is configured and without."""
    whole = dataclasses.replace(plan.model, recompute_granularity=None)
    models = (plan.model, whole)
    return LayerBytes(*(sum(saved(model, plan.seq_length, plan.micro_batch_size).values()) for model in models))


def activation_parts(plan: Plan, stage: int, layer: LayerBytes) -> tuple[int, int, int]:
    """Return what a stage's layers keep at the fullest moment, what a layer's backward pass adds to it, and the rest.

    In a backward pass there are what is computed again, and two layers' activations on their way to the machine's
    memory or back. The rest is the last norm's input and output on the stage that has them, without the logits.
    """
    model, chunks = plan.model, plan.stage_layout.chunks(stage)
    num_offloaded = [_num_offloaded(model, chunk) for chunk in chunks]
    kept = [
        _kept_by_first(model, len(chunk.layer_numbers), layer) - _kept_by_first(model, number, layer)
        for chunk, number in zip(chunks, num_offloaded)
    ]
    again = layer.whole - layer.kept
    if model.recompute_granularity == "full":
        again = layer.whole * ((model.recompute_num_layers or 1) if model.recompute_method == "uniform" else 1)
    again += min(max(num_offloaded), 2) * layer.kept
    ends = 2 * plan.num_rows * model.hidden_size * ELEMENT_BYTES[model.params_dtype] * chunks[-1].has_loss
    return _most_in_flight(plan, stage, kept), again, ends


def _most_in_flight(plan: Plan, stage: int, sizes: Sequence[int]) -> int:
    """Return the most of a stage's passes that wait for their backward passes, where those of its chunks have sizes."""
    in_flight = most = 0
    for kind, _, chunk in plan.warm_up_actions(stage):
        if kind is Pass.FORWARD:
            in_flight += sizes[chunk]
            most = max(most, in_flight)
        elif kind is not Pass.BACKWARD_WEIGHT:
            in_flight -= sizes[chunk]
    return most


def _weights_by_chunk(model: GPTConfig, chunk: StageContents) -> int:
    layers = StageContents(layer_numbers=chunk.layer_numbers[: model.num_offloaded_layers])
    return sum(parameter.size for parameter in chunk_parameters(model, layers)) * ELEMENT_BYTES[model.params_dtype]


def _num_offloaded(model: GPTConfig, chunk: StageContents) -> int:
    """Return of how many of a chunk's layers the activations are offloaded."""
    return min(model.num_offloaded_layers, len(chunk.layer_numbers)) if model.cpu_offloading_activations else 0


def _kept_by_first(model: GPTConfig, num_layers: int, layer: LayerBytes) -> int:
    """Return what the first layers of a chunk keep of one micro-batch."""
    if model.recompute_granularity != "full":
        return num_layers * layer.kept
    length = model.recompute_num_layers or 1
    if model.recompute_method == "uniform":
        return -(-num_layers // length) * layer.kept
    again = min(length, num_layers)
    return again * layer.kept + (num_layers - again) * layer.whole
