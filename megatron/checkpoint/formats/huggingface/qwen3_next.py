"""Qwen3-Next: gated delta-net in most layers, gated attention in the others, experts, and multi-token prediction."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import FULL, norm_links
from megatron.checkpoint.formats.huggingface.deepseek_v3 import further_layers
from megatron.checkpoint.formats.huggingface.family import TensorLink, rows, whole
from megatron.checkpoint.formats.huggingface.qwen import GatedSharedExpertFamily
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import GATED_DELTA_NET, LayerParts, format_layer_pattern

LINEAR = "linear_attention"

_LINEAR_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Shape of the linear attention in the configuration class; our fields have the same names."""


class Qwen3NextFamily(GatedSharedExpertFamily):
    """Qwen3-Next (``Qwen3NextForCausalLM``)."""

    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    default_positions = 32768
    default_groups = 2
    default_head_dim = 256
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "num_experts": 512,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        }
    )

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with the fraction of rotated channels."""
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", 0.25)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of linear attention, gated attention, norms, MoE and MTP; reject biases."""
        settings.require("attention_bias", False, False, "attention biases are not supported")
        is_linear = _linear_layers(settings)
        num_further = further_layers(settings, "mtp.")
        if num_further > 1:
            settings.refuse(f"num_nextn_predict_layers is {num_further}; the architecture has one MTP module or none")
        if num_further and is_linear[-1:] == [True]:
            settings.refuse("the MTP module has attention, but the last layer has linear attention")
        fields = {
            **self.experts_of(settings),
            "apply_layernorm_1p": True,
            "attention_output_gate": True,
            "mtp_num_layers": num_further or None,
            "qk_layernorm": True,
        }
        sizes = {name: settings.integer(name, usual) for name, usual in _LINEAR_DEFAULTS.items()}
        keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
        if values % keys:
            settings.refuse(f"linear_num_value_heads {values} is not divisible by linear_num_key_heads {keys}")
        if not any(is_linear):
            return fields
        pattern = str([1] * len(is_linear)) if all(is_linear) else format_layer_pattern(is_linear)
        return {
            **fields,
            **sizes,
            "experimental_attention_variant": GATED_DELTA_NET,
            "linear_attention_freq": pattern,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        kinds = [LINEAR if parts.mixer == GATED_DELTA_NET else FULL for parts in config.layer_parts]
        return (
            super().write_settings(config)
            | {name: getattr(config.hybrid, name) for name in _LINEAR_DEFAULTS}
            | {
                "attention_bias": False,
                "head_dim": config.kv_channels,
                "layer_types": kinds,
                "num_nextn_predict_layers": config.mtp.mtp_depth,
                "partial_rotary_factor": config.rotary_percent,
            }
        )

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Yield every link; the MTP module comes last."""
        yield from super().links(config)
        width = config.hidden_size
        for depth in range(config.mtp.mtp_depth):
            ours = f"model.mtp.layers.{depth}."
            yield whole(f"{ours}eh_proj.weight", "mtp.fc.weight", (width, 2 * width))
            within, theirs = f"{ours}transformer_layer.", f"mtp.layers.{depth}."
            yield from self.layer_links(config, within, theirs, config.layer_parts[-1])
            yield from norm_links(config, f"{ours}final_layernorm", "mtp.norm")
            yield from norm_links(config, f"{ours}enorm", "mtp.pre_fc_norm_embedding")
            yield from norm_links(config, f"{ours}hnorm", "mtp.pre_fc_norm_hidden")

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of the fused projection: queries and gates alternate in their q_proj, head by head."""
        dim, heads = config.kv_channels, config.num_attention_heads // config.num_query_groups
        native, theirs = f"{ours}self_attention.linear_qkv.weight", f"{theirs}self_attn."
        for group in range(config.num_query_groups):
            start, first = group * (2 * heads + 2) * dim, group * heads
            for kind in range(2):
                for head in range(heads):
                    native_start, foreign_start = start + (kind * heads + head) * dim, (2 * (first + head) + kind) * dim
                    yield rows(
                        native, native_start, f"{theirs}q_proj.weight", foreign_start, dim, (config.hidden_size,)
                    )
            for kind, name in enumerate(("k_proj", "v_proj")):
                native_start = start + (2 * heads + kind) * dim
                yield rows(native, native_start, f"{theirs}{name}.weight", group * dim, dim, (config.hidden_size,))

    def mixer_links(self, config: GPTConfig, ours: str, theirs: str, parts: LayerParts) -> Iterator[TensorLink]:
        """Yield the links of a layer's attention or linear attention."""
        if parts.mixer == GATED_DELTA_NET:
            yield from _linear_attention_links(config, f"{ours}self_attention.", f"{theirs}linear_attn.")
        else:
            yield from super().mixer_links(config, ours, theirs, parts)


def _linear_layers(settings: Settings) -> list[bool]:
    """Return whether each layer has linear attention, according to ``layer_types`` or ``full_attention_interval``."""
    layers, types = settings.integer("num_hidden_layers"), settings.values.get("layer_types")
    if types is None:
        interval = settings.integer("full_attention_interval", 4)
        return [(layer + 1) % interval != 0 for layer in range(min(layers, 100_000))]
    kinds = list(types) if isinstance(types, list) else [types]
    unknown = sorted({str(kind) for kind in kinds if kind not in (FULL, LINEAR)})
    if unknown:
        settings.refuse(f"layer_types contains {', '.join(unknown)}; supported values are {LINEAR} and {FULL}")
    elif len(kinds) != layers:
        settings.refuse(f"layer_types has {len(kinds)} entries, but the model has {layers} layers")
    return [kind == LINEAR for kind in kinds]


def _linear_attention_links(config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
    """Yield the links of a gated delta-net.

    The rows of their projections are ``[q, k, v, gate]`` and ``[beta, decay]`` per key head; ours stack the tensors.
    """
    hybrid, width = config.hybrid, config.hidden_size
    keys, values = hybrid.linear_key_size, hybrid.linear_value_size
    key_heads, heads = hybrid.linear_num_key_heads, hybrid.linear_num_value_heads
    key_rows, value_rows, head_rows = keys // key_heads, values // key_heads, heads // key_heads
    # The order of our tensors: their sizes per key head, with the names of their projections.
    stacked = [("qkvz", key_rows), ("qkvz", key_rows), ("qkvz", value_rows), ("qkvz", value_rows)]
    stacked += [("ba", head_rows), ("ba", head_rows)]
    native, native_start, within = f"{ours}in_proj.weight", 0, {"qkvz": 0, "ba": 0}
    per_head = {name: sum(count for other, count in stacked if other == name) for name in within}
    for name, count in stacked:
        for head in range(key_heads):
            foreign_start = head * per_head[name] + within[name]
            foreign = f"{theirs}in_proj_{name}.weight"
            yield rows(native, native_start + head * count, foreign, foreign_start, count, (width,))
        native_start, within[name] = native_start + key_heads * count, within[name] + count
    convolution = (2 * keys + values, 1, hybrid.linear_conv_kernel_dim)
    yield whole(f"{ours}conv1d.weight", f"{theirs}conv1d.weight", convolution)
    for name in ("A_log", "dt_bias"):
        yield whole(f"{ours}{name}", f"{theirs}{name}", (heads,))
    # Unlike the other norms, this one is not stored minus one in their files.
    norm = whole(f"{ours}out_norm.weight", f"{theirs}norm.weight", (hybrid.linear_value_head_dim,))
    yield replace(norm, foreign_offset=1.0)
    yield whole(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", (width, values))
