"""Cohere: attention and a gated MLP in parallel with one LayerNorm without bias, interleaved RoPE, scaled logits."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class CohereFamily(RotaryDecoderFamily):
    """Command R and Aya 23 (``CohereForCausalLM``)."""

    model_type = "cohere"
    architecture = "CohereForCausalLM"
    default_positions = 8192
    default_epsilon = 1e-5
    default_rotary_base = 500000.0
    is_tied_by_default = True
    epsilon_name = "layer_norm_eps"

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the layers and of the logits; reject biases and QK norms."""
        settings.require("attention_bias", False, False, "attention biases are not supported")
        settings.require("use_qk_norm", False, False, "QK norms with weights of their own per head are not supported")
        return {
            "normalization": "LayerNorm",
            "norm_parameters": "weight",
            "use_parallel_residual": True,
            "shared_parallel_norm": True,
            "rotary_interleaved": True,
            "logit_scale": settings.positive("logit_scale", 0.0625),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {
            "attention_bias": False,
            "logit_scale": config.logit_scale,
            "pad_token_id": None,
            "use_qk_norm": False,
        }
