"""Helium: Llama's layers with interleaved RoPE."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily, bias_fields
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class HeliumFamily(RotaryDecoderFamily):
    """Helium (``HeliumForCausalLM``)."""

    model_type = "helium"
    architecture = "HeliumForCausalLM"
    default_positions = 4096
    default_groups = 20
    default_head_dim = 128
    default_epsilon = 1e-8
    default_rotary_base = 100000.0

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of interleaved RoPE and of biases, which attention's output projection does not have."""
        of_queries, of_mlp = settings.switch("attention_bias", False), settings.switch("mlp_bias", False)
        return {"rotary_interleaved": True, **bias_fields(of_queries=of_queries, of_output=False, of_mlp=of_mlp)}

    def check_heads(self, settings: Settings, width: int, heads: int, groups: int, head_dim: int) -> None:
        """Reject heads that together are not as wide as the hidden states, which the output projection assumes."""
        super().check_heads(settings, width, heads, groups, head_dim)
        if heads * head_dim != width and not settings.problems:
            settings.refuse(f"hidden_size {width} must be num_attention_heads {heads} times head_dim {head_dim}")

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {
            "attention_bias": config.has_qkv_bias,
            "mlp_bias": config.add_bias_linear,
        }
