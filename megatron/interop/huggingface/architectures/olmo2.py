"""OLMo 2: Llama's layers with their norms behind attention and feed-forward, and all query and key heads normalized."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.decoder_parts.rotary_decoder import RotaryDecoderFamily
from megatron.interop.huggingface.settings import Settings


class Olmo2Family(RotaryDecoderFamily):
    """Translate OLMo 2 (``Olmo2ForCausalLM``)."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    default_positions = 2048
    default_epsilon = 1e-5
    norm_names = (
        ("post_self_attn_layernorm", "post_attention_layernorm"),
        ("post_mlp_layernorm", "post_feedforward_layernorm"),
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return where the norms are; note biases."""
        settings.require("attention_bias", False, False, "attention has no biases")
        return {"norm_placement": "after", "qk_layernorm": True, "qk_layernorm_across_heads": True}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {"attention_bias": False}
