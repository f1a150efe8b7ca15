"""Persimmon: LayerNorm, also of queries and keys per head, partial RoPE, squared ReLU, and biases everywhere."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily, linear_links
from megatron.checkpoint.formats.huggingface.family import TensorLink
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class PersimmonFamily(RotaryDecoderFamily):
    """Persimmon (``PersimmonForCausalLM``), whose fused QKV rows have the native order: query, key, value per head."""

    model_type = "persimmon"
    architecture = "PersimmonForCausalLM"
    default_positions = 16384
    default_epsilon = 1e-5
    activation = ("hidden_act", "relu2", "squared_relu")
    epsilon_name = "layer_norm_eps"
    attention_output = "dense"
    final_norm = "final_layernorm"
    mlp_names = ("dense_h_to_4h", "dense_4h_to_h")
    head_norm_names = MappingProxyType({"q": "q_layernorm", "k": "k_layernorm"})

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with the fraction of rotated channels."""
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", 0.5)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms and biases; reject what the layers do not have here."""
        heads = settings.integer("num_attention_heads")
        width = settings.integer("hidden_size") // heads
        settings.require("num_key_value_heads", heads, heads, "each head has its own keys and values")
        settings.require("head_dim", width, width, "it is hidden_size / num_attention_heads")
        settings.require("hidden_dropout", 0.0, 0.0, "dropout after the MLP alone is not supported")
        return {
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "qk_layernorm": settings.switch("qk_layernorm", True),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config)
        del settings["num_key_value_heads"]
        return settings | {
            "hidden_dropout": 0.0,
            "partial_rotary_factor": config.rotary_percent,
            "qk_layernorm": config.qk_layernorm,
        }

    def attention_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's fused QKV projection."""
        names = f"{ours}self_attention.linear_qkv", f"{theirs}self_attn.query_key_value"
        yield from linear_links(
            *names, (3 * config.query_projection_size, config.hidden_size), has_bias=config.add_bias_linear
        )
