"""Cohere: attention and a gated MLP in parallel with one LayerNorm without bias, interleaved RoPE, scaled logits.

Cohere 2 has sliding windows in three of four layers, and RoPE in these layers only.
"""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    RotaryDecoderFamily,
    no_rope_pattern,
    read_layer_types,
    window_fields,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box


class CohereFamily(RotaryDecoderFamily):
    """Command R and Aya 23 (``CohereForCausalLM``)."""

    model_type = "cohere"
    architecture = "CohereForCausalLM"
    default_positions = 8192
    default_epsilon = 1e-5
    default_rotary_base = 500000.0
    is_tied_by_default = True
    bias_settings = MappingProxyType({ATTENTION_BIAS: False})
    epsilon_name = "layer_norm_eps"

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the layers and of the logits."""
        has_head_norms = self.model_type == "cohere" and settings.switch("use_qk_norm", False)
        return {
            "qk_layernorm": has_head_norms,
            "qk_layernorm_per_head": has_head_norms,
            "normalization": "LayerNorm",
            "norm_parameters": "weight",
            "use_parallel_residual": True,
            "shared_parallel_norm": True,
            "rotary_interleaved": True,
            "logit_scale": settings.positive("logit_scale", 0.0625),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {
            "logit_scale": config.logit_scale,
            "pad_token_id": None,
            "use_qk_norm": config.qk_layernorm,
        }

    def attention_norm_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of the QK norms, whose weights in the files have a row per head."""
        width = config.kv_channels
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_query_groups)):
            for head in range(heads):
                native, box = f"{ours}self_attention.{name}_layernorm.weight", Box((head * width,), (width,))
                row = Box((head, 0), (1, width))
                yield TensorLink(native, box, f"{theirs}self_attn.{name}_norm.weight", row, foreign_ones=(1, 0))


class Cohere2Family(CohereFamily):
    """Command R7B and Command A (``Cohere2ForCausalLM``)."""

    model_type = "cohere2"
    architecture = "Cohere2ForCausalLM"
    default_rotary_base = 10000.0

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the layers, the sliding windows and the layers without RoPE."""
        layers = min(settings.integer("num_hidden_layers"), 100_000)
        period = settings.integer("sliding_window_pattern", 4)
        has_window = read_layer_types(settings, [(layer + 1) % period != 0 for layer in range(layers)])
        windows = window_fields(settings, has_window, 4096)
        return super().own_fields(settings) | windows | {"no_rope_freq": no_rope_pattern(has_window)}

    def check_heads(self, settings: Settings, width: int, heads: int, groups: int, head_dim: int) -> None:
        """Reject a head dimension other than the hidden size divided by the number of heads."""
        super().check_heads(settings, width, heads, groups, head_dim)
        if heads * head_dim != width and not settings.problems:
            settings.refuse(f"hidden_size {width} must be num_attention_heads {heads} times head_dim {head_dim}")

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        settings = super().write_settings(config)
        del settings["use_qk_norm"]
        return settings | written_layer_types(config)
