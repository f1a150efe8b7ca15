"""Llama, with the RoPE scaling of Llama 3.1."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class LlamaFamily(RotaryDecoderFamily):
    """Llama (``LlamaForCausalLM``), without biases."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    default_positions = 2048

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Reject biases."""
        settings.require("attention_bias", False, False, "attention biases are not supported")
        settings.require("mlp_bias", False, False, "biases in the feed-forward layer are not supported")
        return {}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {"attention_bias": False, "mlp_bias": False}
