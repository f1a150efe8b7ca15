"""StableLM: LayerNorm with biases, partial RoPE, and a gated MLP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.family import TensorLink, rows
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class StableLmFamily(RotaryDecoderFamily):
    """StableLM 3B and StableLM 2 (``StableLmForCausalLM``)."""

    model_type = "stablelm"
    architecture = "StableLmForCausalLM"
    default_positions = 4096
    default_groups = 32
    default_epsilon = 1e-5
    epsilon_name = "layer_norm_eps"

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with the fraction of rotated channels."""
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", 0.25)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms and QKV biases; reject what the layers do not have here."""
        settings.require("hidden_dropout", 0.0, 0.0, "dropout after the MLP alone is not supported")
        is_parallel, has_head_norms = (
            settings.switch(name, False) for name in ("use_parallel_residual", "qk_layernorm")
        )
        return {
            "normalization": "LayerNorm",
            "add_qkv_bias": settings.switch("use_qkv_bias", False),
            "qk_layernorm": has_head_norms,
            "qk_layernorm_per_head": has_head_norms,
            "use_parallel_residual": is_parallel,
            "shared_parallel_norm": is_parallel,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "hidden_dropout": 0.0,
            "partial_rotary_factor": config.rotary_percent,
            "qk_layernorm": config.qk_layernorm,
            "use_parallel_residual": config.use_parallel_residual,
            "use_qkv_bias": config.has_qkv_bias,
        }

    def attention_norm_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of the QK norms, which are modules of their own per head in the files."""
        width = config.kv_channels
        for name, heads in (("q", config.num_attention_heads), ("k", config.num_query_groups)):
            for head in range(heads):
                native, foreign = f"{ours}self_attention.{name}_layernorm.weight", f"{theirs}self_attn.{name}_layernorm"
                yield rows(native, head * width, f"{foreign}.norms.{head}.weight", 0, width, ())
