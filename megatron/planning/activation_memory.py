"""What a transformer layer keeps for its backward pass, in bytes, before anything runs.

Kept are tensors that autograd saves, each piece of memory once. Parameters are left out, and what is of the micro-batch
and shared by layers: positions, masks, angles, keys of dropout. The forms are exact for the fused kernels: attention
that keeps no weights, norms that keep a scale (and a mean) a token.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from megatron.core.context_parallel.head_sharing import key_value_heads_of_rank
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.pipeline_parallel.action import Pass
from megatron.core.pipeline_parallel.schedules import SCHEDULES
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.planning.chunk_parameters import chunk_parameters
from megatron.planning.closed_forms import ELEMENT_BYTES
from megatron.planning.kept_inputs import KeptInput, kept_input

if TYPE_CHECKING:
    from megatron.training.config.run_config import RunConfig


def saved_bytes(
    config: TransformerConfig, seq_length: int, micro_batch_size: int, layer_number: int | None = None
) -> Mapping[str, int]:
    """Return by part what one layer keeps of one micro-batch on one rank, with the recompute that is configured.

    Without a number it is a layer in fp8, if the model has one. With full recompute only ``stream`` is left, which the
    first layer of each group keeps.
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
    fc1_width = ffn * (2 if config.is_gated else 1)
    modules = config.recomputed_modules
    num_norms = 0 if config.norm_placement == "after" else 2
    float8_layers = config.float8_layers(config.num_layers)
    in_float8 = layer_number in float8_layers if layer_number is not None else len(float8_layers) > 0

    def kept(name: str, num_rows: int, out_width: int, in_width: int) -> KeptInput:
        is_recomputed = "layernorm" in modules and name in ("linear_qkv", "linear_fc1")
        widths = out_width, in_width
        return kept_input(config, name, num_rows, widths, in_float8=in_float8, is_recomputed=is_recomputed)

    qkv = kept("linear_qkv", rows, (heads + 2 * groups) * width, config.hidden_size)
    proj = kept("linear_proj", tokens, config.hidden_size, heads * width)
    fc1 = kept("linear_fc1", rows, fc1_width, config.hidden_size)
    fc2 = kept("linear_fc2", tokens, config.hidden_size, ffn)
    if "mlp" in modules:
        # Kept is what the feed-forward is computed from.
        fc1, fc2 = KeptInput(is_whole=True), KeptInput(is_whole=False)
    layers = (qkv, proj, fc1, fc2)
    norm_outputs = 0 if "layernorm" in modules or not num_norms else (qkv.is_whole + fc1.is_whole) * hidden
    # The core attention's own backward pass needs its output too.
    has_output = proj.is_whole or "core_attn" not in modules
    parts = {
        # In front of each norm: its sum, and numbers a token.
        "stream": 2 * hidden,
        "norm numbers": num_norms * rows * wide * (2 if config.normalization == "LayerNorm" else 1),
        "norm outputs": norm_outputs,
        "query, key, value": tokens * (heads + 2 * groups) * width * element,
        "attention numbers": 0 if "core_attn" in modules else tokens * heads * wide,
        "attention output": tokens * heads * width * element if has_output else 0,
        "feed-forward": 0 if "mlp" in modules else tokens * (fc1_width + fc2.is_whole * ffn) * element,
        "inputs in fp8": sum(layer.rounded for layer in layers),
        "scales": sum(layer.scales for layer in layers),
        "adapters": sum(layer.adapters for layer in layers),
    }
    return {name: size for name, size in parts.items() if size}


def offloaded_bytes(config: RunConfig) -> int:
    """Return the most that a rank leaves in the machine's memory: weights, and activations of what is in flight."""
    model, most = config.model, 0
    for stage in range(model.pipeline_model_parallel_size):
        chunks = config.stage_layout.chunks(stage)
        weights = sum(_weights_by_chunk(model, chunk) for chunk in chunks) if model.cpu_offloading_weights else 0
        sizes = [_kept_by(config, chunk.layer_numbers[: _num_offloaded(model, chunk)]) for chunk in chunks]
        most = max(most, weights + _most_in_flight(config, stage, sizes))
    return most


def activation_bytes(config: RunConfig, rank: int) -> int:
    """Return the bytes of activations on a rank's device at the fullest moment of a training step.

    Counted are what the layers keep of what is in flight, but for what is offloaded; what is computed again, and two
    layers' on their way to the machine's memory or back; and on the stage that has them the last norm's input and
    output (which a frozen output layer does not keep) and the logits of one micro-batch, once in the model's type and
    twice in float32.
    """
    model, sizes = config.model, config.parallel_sizes
    stage = sizes.place(rank)["pp"]
    chunks = config.stage_layout.chunks(stage)
    num_offloaded = [_num_offloaded(model, chunk) for chunk in chunks]
    kept = [
        _kept_by(config, chunk.layer_numbers) - _kept_by(config, chunk.layer_numbers[:number])
        for chunk, number in zip(chunks, num_offloaded)
    ]
    unit, whole = (
        _unit_bytes(config, model),
        _unit_bytes(config, dataclasses.replace(model, recompute_granularity=None)),
    )
    again = whole - unit
    if model.recompute_granularity == "full":
        again = whole * ((model.recompute_num_layers or 1) if model.recompute_method == "uniform" else 1)
    total = _most_in_flight(config, stage, kept) + again + min(max(num_offloaded), 2) * unit
    if any(chunk.has_loss for chunk in chunks):
        tokens, element = (
            config.data.seq_length // sizes.cp * config.training.micro_batch_size,
            ELEMENT_BYTES[model.params_dtype],
        )
        rows = tokens // sizes.tp if model.sequence_parallel else tokens
        total += (1 if model.lora_rank else 2) * rows * model.hidden_size * element
        total += tokens * (model.padded_vocab_size // sizes.tp) * (element + 8)
    return total


def _most_in_flight(config: RunConfig, stage: int, sizes: Sequence[int]) -> int:
    """Return the most of a stage's passes that wait for their backward passes, where those of its chunks have sizes."""
    model, training = config.model, config.training
    num_microbatches = training.global_batch_size // (training.micro_batch_size * config.data_parallel_size)
    group = model.microbatch_group_size_per_virtual_pipeline_stage
    pp, most = model.pipeline_model_parallel_size, 0
    in_flight = Counter[int]()
    for action in SCHEDULES[config.pipeline_schedule](pp, stage, num_microbatches, len(sizes), group):
        if action.kind is not Pass.BACKWARD_WEIGHT:
            in_flight[action.chunk] += 1 if action.kind is Pass.FORWARD else -1
        most = max(most, sum(count * sizes[chunk] for chunk, count in in_flight.items()))
    return most


def _weights_by_chunk(model: GPTConfig, chunk: StageContents) -> int:
    layers = StageContents(layer_numbers=chunk.layer_numbers[: model.num_offloaded_layers])
    return sum(parameter.size for parameter in chunk_parameters(model, layers)) * ELEMENT_BYTES[model.params_dtype]


def _num_offloaded(model: GPTConfig, chunk: StageContents) -> int:
    """Return of how many of a chunk's layers the activations are offloaded."""
    return min(model.num_offloaded_layers, len(chunk.layer_numbers)) if model.cpu_offloading_activations else 0


def _unit_bytes(config: RunConfig, model: GPTConfig) -> int:
    """Return the most that a layer keeps of one micro-batch, or the first of a group with full recompute."""
    return max(_layer_bytes(config, model, number) for number in range(model.num_layers))


def _layer_bytes(config: RunConfig, model: GPTConfig, number: int) -> int:
    return sum(saved_bytes(model, config.data.seq_length, config.training.micro_batch_size, number).values())


def _kept_by(config: RunConfig, layer_numbers: Sequence[int]) -> int:
    """Return what the first layers of a chunk, those with these numbers, keep of one micro-batch."""
    model = config.model
    sizes = [_layer_bytes(config, model, number) for number in layer_numbers]
    if model.recompute_granularity != "full":
        return sum(sizes)
    length = model.recompute_num_layers or 1
    if model.recompute_method == "uniform":
        return sum(sizes[::length])
    whole = dataclasses.replace(model, recompute_granularity=None)
    return sum(sizes[:length]) + sum(_layer_bytes(config, whole, number) for number in layer_numbers[length:])
