"""Qwen3-Next and Qwen3.5 (text): gated delta-net in most layers, gated attention in the others, experts, and MTP."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    LINEAR,
    RotaryDecoderFamily,
    linear_attention_fields,
    norm_links,
    qkv_parameters,
    read_layer_types,
    written_linear_layers,
)
from megatron.checkpoint.formats.huggingface.deepseek_v3 import further_layers
from megatron.checkpoint.formats.huggingface.family import TensorLink, rows, stacked_rows, whole
from megatron.checkpoint.formats.huggingface.qwen import GatedSharedExpertFamily
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import GATED_DELTA_NET, LayerParts

_LINEAR_DEFAULTS = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
"""Shape of the linear attention in the configuration class; our fields have the same names."""


class DeltaNetFamily(RotaryDecoderFamily):
    """Base of the architectures with gated delta-net in some layers and gated attention in the others."""

    default_positions = 32768
    default_head_dim = 256
    mtp_setting = "num_nextn_predict_layers"
    bias_settings = MappingProxyType({ATTENTION_BIAS: False})

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with the fraction of rotated channels."""
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", 0.25)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of linear attention, gated attention, norms and MTP, and of MoE."""
        layers, interval = settings.integer("num_hidden_layers"), settings.integer("full_attention_interval", 4)
        usual = [(layer + 1) % interval != 0 for layer in range(min(layers, 100_000))]
        is_linear = read_layer_types(settings, usual, LINEAR)
        num_further = further_layers(settings, "mtp.", self.mtp_setting)
        if num_further > 1:
            settings.refuse(f"{self.mtp_setting} is {num_further}; the architecture has one MTP module or none")
        if num_further and is_linear[-1:] == [True]:
            settings.refuse("the MTP module has attention, but the last layer has linear attention")
        sizes = {name: settings.integer(name, usual) for name, usual in _LINEAR_DEFAULTS.items()}
        keys, values = sizes["linear_num_key_heads"], sizes["linear_num_value_heads"]
        if values % keys:
            settings.refuse(f"linear_num_value_heads {values} is not divisible by linear_num_key_heads {keys}")
        return {
            **super().own_fields(settings),
            "apply_layernorm_1p": True,
            "attention_output_gate": True,
            "mtp_num_layers": num_further or None,
            "qk_layernorm": True,
            **(sizes if any(is_linear) else {}),
            **linear_attention_fields(GATED_DELTA_NET, is_linear),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return (
            super().write_settings(config)
            | {name: getattr(config.hybrid, name) for name in _LINEAR_DEFAULTS}
            | {
                "head_dim": config.kv_channels,
                "layer_types": written_linear_layers(config),
                self.mtp_setting: config.mtp.mtp_depth,
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
        theirs = f"{theirs}self_attn."
        for parameter, trailing in qkv_parameters(config):
            native = f"{ours}self_attention.linear_qkv.{parameter}"
            for group in range(config.num_query_groups):
                start, first = group * (2 * heads + 2) * dim, group * heads
                for kind in range(2):
                    for head in range(heads):
                        native_start = start + (kind * heads + head) * dim
                        foreign_start = (2 * (first + head) + kind) * dim
                        yield rows(native, native_start, f"{theirs}q_proj.{parameter}", foreign_start, dim, trailing)
                for kind, name in enumerate(("k_proj", "v_proj")):
                    native_start = start + (2 * heads + kind) * dim
                    yield rows(native, native_start, f"{theirs}{name}.{parameter}", group * dim, dim, trailing)

    def mixer_links(self, config: GPTConfig, ours: str, theirs: str, parts: LayerParts) -> Iterator[TensorLink]:
        """Yield the links of a layer's attention or linear attention."""
        if parts.mixer != GATED_DELTA_NET:
            yield from super().mixer_links(config, ours, theirs, parts)
            return
        hybrid, ours, theirs = config.hybrid, f"{ours}self_attention.", f"{theirs}linear_attn."
        keys, values, heads = hybrid.linear_key_size, hybrid.linear_value_size, hybrid.linear_num_value_heads
        yield from self.projection_links(config, ours, theirs)
        convolution = (2 * keys + values, 1, hybrid.linear_conv_kernel_dim)
        yield whole(f"{ours}conv1d.weight", f"{theirs}conv1d.weight", convolution)
        for name in ("A_log", "dt_bias"):
            yield whole(f"{ours}{name}", f"{theirs}{name}", (heads,))
        # Unlike the other norms, this one is not stored minus one in their files.
        norm = whole(f"{ours}out_norm.weight", f"{theirs}norm.weight", (hybrid.linear_value_head_dim,))
        yield replace(norm, foreign_offset=1.0)
        yield whole(f"{ours}out_proj.weight", f"{theirs}out_proj.weight", (config.hidden_size, values))

    def projection_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a gated delta-net's input projection, whose tensors ours stacks."""
        hybrid, width = config.hybrid, config.hidden_size
        keys, values, heads = hybrid.linear_key_size, hybrid.linear_value_size, hybrid.linear_num_value_heads
        stacked = (("qkv", 2 * keys + values), ("z", values), ("b", heads), ("a", heads))
        parts = ((f"{theirs}in_proj_{name}.weight", count) for name, count in stacked)
        yield from stacked_rows(f"{ours}in_proj.weight", parts, (width,))


class Qwen3NextFamily(DeltaNetFamily, GatedSharedExpertFamily):
    """Qwen3-Next (``Qwen3NextForCausalLM``)."""

    model_type = "qwen3_next"
    architecture = "Qwen3NextForCausalLM"
    default_groups = 2
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "num_experts": 512,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "norm_topk_prob": True,
        }
    )

    def projection_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a gated delta-net's input projection.

        The rows of their projections are ``[q, k, v, gate]`` and ``[beta, decay]`` per key head.
        """
        hybrid, width = config.hybrid, config.hidden_size
        key_heads, heads = hybrid.linear_num_key_heads, hybrid.linear_num_value_heads
        key_rows, head_rows = hybrid.linear_key_head_dim, heads // key_heads
        value_rows = hybrid.linear_value_size // key_heads
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
