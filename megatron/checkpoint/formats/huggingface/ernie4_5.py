"""ERNIE 4.5: Llama's layers with interleaved RoPE and optional biases in every linear layer."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class Ernie4_5Family(RotaryDecoderFamily):
    """ERNIE 4.5 without experts (``Ernie4_5ForCausalLM``)."""

    model_type = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    default_positions = 131072
    default_groups = 2
    default_head_dim = 128
    default_epsilon = 1e-5
    default_rotary_base = 500000.0
    is_tied_by_default = True

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of biases and interleaved RoPE; transformers has no dropout here."""
        settings.require("attention_dropout", 0.0, 0.0, "the architecture has no dropout")
        return {"add_bias_linear": settings.switch("use_bias", False), "rotary_interleaved": True}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {"use_bias": config.add_bias_linear}
