"""What a transformer layer keeps for its backward pass, in bytes, before anything runs.

Kept are tensors that autograd saves, each piece of memory once. Parameters are left out, and what is of the micro-batch
and shared by layers: positions, masks, angles, keys of dropout. The forms are exact for the fused kernels: attention
that keeps no weights, norms that keep a scale (and a mean) a token.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from megatron.core.context_parallel.key_value_heads import copies_of_key_value_heads, key_value_heads_of_rank
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.parallel_config import ELEMENT_BYTES
from megatron.core.pipeline_parallel.schedule_actions import most_in_flight
from megatron.core.pipeline_parallel.stage_layout import StageContents
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.planner.plan import LayerKind, Plan, layer_kinds
from tests.closed_forms.expert_traffic import SendingExpertLayer
from tests.closed_forms.further_memory import kept_by_join
from tests.closed_forms.kept_inputs import KeptInput, is_in_float8, kept_input
from tests.closed_forms.latent_memory import kept_by_latent_attention
from tests.closed_forms.layer_widths import layer_widths
from tests.closed_forms.norm_memory import kept_behind, kept_by_head_norms, norm_numbers, reads_frozen

if TYPE_CHECKING:
    from megatron.config.run_config import RunConfig


_READ_STREAM = ("linear_qkv", "linear_q_proj", "linear_q_down_proj", "linear_kv_down_proj")
"""Linear layers of an attention that take what the norm in front of it gives."""
SavedBytes = Callable[[GPTConfig, int, int, int], Mapping[str, int]]
"""Return by part what a layer keeps of a micro-batch, from (model, sequence length, micro-batch size, layer number)."""


@dataclass(frozen=True)
class LayerBytes:
    """Hold what one layer keeps of one micro-batch: as configured, and without any recompute.

    With full recompute ``kept`` is what the first layer of each group keeps. ``has_experts`` says what its feed-forward
    is.
    """

    kept: int
    whole: int
    has_experts: bool = False


def saved_bytes(
    config: DecoderConfig, seq_length: int, micro_batch_size: int, layer_number: int | None = None
) -> Mapping[str, int]:
    """Return by part what one layer keeps of one micro-batch on one rank, with the recompute that is configured.

    Without a number it is a layer in fp8, if the model has one. With full recompute only ``stream`` is left, which the
    first layer of each group keeps.
    """
    config = config.of_layer(layer_number or 0)
    tp, element = config.tensor_model_parallel_size, ELEMENT_BYTES[config.params_dtype]
    tokens = seq_length // config.context_parallel_size * micro_batch_size
    rows = tokens // tp if config.sequence_parallel else tokens
    hidden = rows * config.hidden_size * element
    join = kept_by_join(config, layer_number, rows, element)
    if config.recompute_granularity == "full":
        return {"stream": hidden // tp if config.distribute_saved_activations and not join else hidden, **join}
    wide = max(element, 4)
    width, heads = config.kv_channels, config.num_attention_heads // tp
    groups = key_value_heads_of_rank(config.num_query_groups, tp)
    ffn = config.ffn_hidden_size // tp
    fc1_width = ffn * (2 if config.is_gated else 1)
    modules = config.recomputed_modules
    num_norms = 0 if config.norm_placement == "post" else 2
    num_reads = 2 - (reads_frozen(config, layer_number) and "layernorm" not in modules)
    in_float8 = is_in_float8(config, layer_number)

    def kept(name: str, num_rows: int, out_width: int, in_width: int) -> KeptInput:
        is_recomputed = "layernorm" in modules and name in (*_READ_STREAM, "linear_fc1")
        widths = out_width, in_width
        return kept_input(config, name, num_rows, widths, in_float8=in_float8, is_recomputed=is_recomputed)

    widths = layer_widths(config)
    of_attention = {
        name: kept(name, tokens if name == "linear_proj" else rows, out_width, in_width)
        for name, (in_width, out_width) in widths.items()
        if name not in ("linear_fc1", "linear_fc2")
    }
    proj, reads_whole = of_attention["linear_proj"], [of_attention[n].is_whole for n in _READ_STREAM if n in widths]
    if config.mla.q_lora_rank is None and "mla_up_proj" in modules:
        reads_whole.append(True)  # Queries are widened again from what the norm gave.
    experts: Mapping[str, int] | None = None
    has_experts = config.moe_layers[config.kind_of(layer_number or 0)]
    whole_width = (config.moe.moe_shared_expert_intermediate_size or 0) // tp if has_experts else ffn
    fc1 = kept("linear_fc1", rows, whole_width * (2 if config.is_gated else 1), config.hidden_size)
    fc2 = kept("linear_fc2", tokens, config.hidden_size, whole_width)
    if has_experts:
        layer = SendingExpertLayer(config, tokens, micro_batch_size, element)
        experts = {} if "moe" in modules else layer.kept(shared_keeps=fc2.is_whole)
        is_alone = "moe" in modules or "shared_experts" in modules or not whole_width
        keeps = "moe" in modules or layer.keeps_input(shared_keeps=fc1.is_whole)
        fc1 = KeptInput(keeps) if is_alone else replace(fc1, is_whole=keeps)
        fc2 = KeptInput(is_whole=False) if is_alone else replace(fc2, is_whole=False)
    elif "mlp" in modules:
        # Kept is what the feed-forward is computed from.
        fc1, fc2 = KeptInput(is_whole=True), KeptInput(is_whole=False)
    layers = (*of_attention.values(), fc1, fc2)
    norm_outputs = 0 if "layernorm" in modules or not num_norms else (any(reads_whole) + fc1.is_whole) * hidden
    is_recomputed = "core_attn" in modules
    exchange = config.cp_exchange(config.kind_of(layer_number or 0)) if config.context_parallel_size > 1 else ""
    # The core attention's own backward pass needs its output too: the same, but where that travels or is joined.
    is_copied = exchange not in ("", "p2p")
    outputs = proj.is_whole + (not is_recomputed) if is_copied else proj.is_whole or not is_recomputed
    shared = groups if is_recomputed else groups * _copies(config, exchange, heads, groups)
    attention = {
        "query, key, value": tokens * (heads + 2 * shared) * width * element,
        "gathered keys and values": _gathered(config, config.kind_of(layer_number or 0))
        * 2
        * tokens
        * groups
        * width
        * element,
        "attention numbers": 0 if "core_attn" in modules else tokens * heads * wide,
        "attention output": outputs * tokens * heads * width * element,
    }
    if config.mla.multi_latent_attention:
        attention = dict(kept_by_latent_attention(config, tokens, rows, element, exchange, in_float8=in_float8))
    parts = {
        # In front of each norm: its sum, and numbers a token.
        "stream": num_reads * hidden,
        "norm numbers": (num_norms and num_reads) * rows * wide * norm_numbers(config),
        "norm outputs": norm_outputs,
        "norms behind": kept_behind(config, rows, element),
        "before the scalar": hidden * config.layer_scalar,
        "norms of queries and keys": tokens
        * kept_by_head_norms(config, heads, groups, element, is_plain=False, is_copied=is_copied),
        **attention,
        "feed-forward": 0
        if "mlp" in modules or experts is not None
        else tokens * (fc1_width + fc2.is_whole * ffn) * element,
        "inputs in fp8": sum(layer.rounded for layer in layers),
        "scales": sum(layer.scales for layer in layers),
        "adapters": sum(layer.adapters for layer in layers),
        **(experts or {}),
        **join,
    }
    return {name: size for name, size in parts.items() if size}


def _copies(config: DecoderConfig, exchange: str, heads: int, groups: int) -> int:
    """Return how often key-value heads are repeated, so that every rank of an all-to-all has some."""
    if exchange not in ("a2a", "a2a+p2p"):
        return 1
    size = config.context_parallel_size if exchange == "a2a" else config.cp_inner_size or 1
    return copies_of_key_value_heads(heads, groups, size) or 1


def _gathered(config: DecoderConfig, layer_number: int) -> int:
    """Return how many other ranks' keys and values a layer keeps beside its own."""
    is_gathered = config.context_parallel_size > 1 and config.cp_exchange(layer_number) == "all_gather"
    return config.context_parallel_size - 1 if is_gathered and "core_attn" not in config.recomputed_modules else 0


def activation_bytes(config: RunConfig, rank: int) -> int:
    """Return the bytes of activations on a rank's device at the fullest moment of a training step.

    Counted are what the layers keep of what is in flight, but for what is offloaded; what is computed again, and two
    layers' on their way to the machine's memory or back; and on the stage that has them the last norm's input and
    output (which a frozen output layer does not keep) and the logits of one micro-batch, once in the model's type and
    twice in float32.
    """
    plan = Plan.of(config)
    stage = plan.parallel_sizes.place(rank)["pp"]
    layers = layer_bytes(plan)
    total = sum(activation_parts(plan, stage, layers))
    total += max(in_backward_passes(plan, stage, layers).values(), default=0)
    if plan.stage_layout.contents(stage, -1).has_loss:
        total += plan.num_logits * (ELEMENT_BYTES[plan.model.params_dtype] + 8)
    return total


def layer_bytes(plan: Plan, saved: SavedBytes = saved_bytes) -> Sequence[LayerBytes]:
    """Return what each layer keeps of one micro-batch, with the recompute that is configured and without.

    Layers that predict further tokens are behind the others.
    """
    models = [plan.model]
    if plan.model.recompute_granularity is not None:
        models.append(_without_recompute(plan.model))
    kinds = layer_kinds(plan.model, plan.seq_length)
    of_kind: dict[tuple[LayerKind, bool], LayerBytes] = {}
    # Behind a frozen embedding a layer keeps less.
    keys = [(kind, number == 0 and bool(plan.model.lora_rank)) for number, kind in enumerate(kinds)]
    for number, key in enumerate(keys):
        if key not in of_kind:
            several = (saved(model, plan.seq_length, plan.micro_batch_size, number) for model in models)
            sizes = [sum(parts.values()) for parts in several]
            of_kind[key] = LayerBytes(sizes[0], sizes[-1], key[0].has_experts)
    return [of_kind[key] for key in keys]


# A search asks for the same models thousands of times.
@functools.lru_cache(maxsize=64)
def _without_recompute(model: GPTConfig) -> GPTConfig:
    return dataclasses.replace(model, recompute_granularity=None)


def activation_parts(plan: Plan, stage: int, layers: Sequence[LayerBytes]) -> tuple[int, int]:
    """Return what a stage's layers keep at the fullest moment, and the rest.

    The rest is the last norm's input and output on the stage that has them, without the logits; a frozen output layer
    keeps no input.
    """
    model, chunks = plan.model, plan.stage_layout.chunks(stage)
    num_ends = (1 if model.lora_rank else 2 + model.mtp.mtp_depth) * chunks[-1].has_loss
    ends = num_ends * plan.num_rows * model.hidden_size * ELEMENT_BYTES[model.params_dtype]
    return _most_in_flight(plan, stage, kept_of_chunks(plan, stage, layers)), ends


def in_backward_passes(plan: Plan, stage: int, layers: Sequence[LayerBytes]) -> Mapping[bool, int]:
    """Return the most activations that come to those that are kept when a layer's backward pass begins, for layers
    without experts (False) and with experts (True), as far as the stage has such layers.

    They are what is computed again, with that of the layers in front of it in its group, and two layers' activations
    on their way to the machine's memory or back.
    """
    model, most = plan.model, dict[bool, int]()
    for chunk in plan.stage_layout.chunks(stage):
        offloaded = sorted(layer.kept for layer in _of(layers, chunk)[: _num_offloaded(model, chunk)])
        further = layers[model.num_layers :] if chunk.has_loss else ()
        most |= dict.fromkeys({layer.has_experts for layer in _of(layers, chunk)} - most.keys(), 0)
        for group in (*_groups(model, _of(layers, chunk)), *((layer,) for layer in further)):
            again = sum(offloaded[-2:])
            for layer in group:
                again += layer.whole - layer.kept * (model.recompute_granularity != "full")
                most[layer.has_experts] = max(most.get(layer.has_experts, 0), again)
    return most


def _groups(model: GPTConfig, layers: Sequence[LayerBytes]) -> Collection[Sequence[LayerBytes]]:
    """Return the unlike groups of a chunk's layers that are computed again together, without layers that never are."""
    length = model.recompute_num_layers or 1
    if model.recompute_granularity == "full" and model.recompute_method == "block":
        layers = layers[:length]
    elif model.recompute_granularity == "full" and length > 1:
        return [layers[first : first + length] for first in range(0, len(layers), length)]
    # Layers of a kind are one.
    return {id(layer): (layer,) for layer in layers}.values()


def kept_of_chunks(plan: Plan, stage: int, layers: Sequence[LayerBytes]) -> Sequence[int]:
    """Return what the layers of each of a stage's chunks keep of one micro-batch on the device."""
    model, chunks = plan.model, plan.stage_layout.chunks(stage)
    own = [(_of(layers, chunk), _num_offloaded(model, chunk)) for chunk in chunks]
    # Each layer of a further token is a group of its own.
    further = [sum(layer.kept for layer in layers[model.num_layers :]) * chunk.has_loss for chunk in chunks]
    return [
        _kept_by(model, several) - _kept_by(model, several[:number]) + behind
        for (several, number), behind in zip(own, further, strict=True)
    ]


def _most_in_flight(plan: Plan, stage: int, sizes: Sequence[int]) -> int:
    """Return the most of a stage's passes that wait for their backward passes, where those of its chunks have sizes."""
    if len(set(sizes)) == 1:
        return sizes[0] * plan.most_passes_in_flight(stage)
    return most_in_flight(plan.warm_up_actions(stage), sizes)


def _num_offloaded(model: GPTConfig, chunk: StageContents) -> int:
    """Return of how many of a chunk's layers the activations are offloaded."""
    return min(model.num_offloaded_layers, len(chunk.layer_numbers)) if model.cpu_offloading_activations else 0


def _of(layers: Sequence[LayerBytes], chunk: StageContents) -> Sequence[LayerBytes]:
    return [layers[number] for number in chunk.layer_numbers]


def _kept_by(model: GPTConfig, layers: Sequence[LayerBytes]) -> int:
    """Return what the first layers of a chunk, these, keep of one micro-batch."""
    if model.recompute_granularity != "full":
        return sum(layer.kept for layer in layers)
    length = model.recompute_num_layers or 1
    if model.recompute_method == "uniform":
        return sum(layer.kept for layer in layers[::length])
    return sum(layer.kept for layer in layers[:length]) + sum(layer.whole for layer in layers[length:])
