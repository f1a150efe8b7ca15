"""Qwen2 and Qwen2.5: Llama's layers with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.decoder_parts.layer_types import read_layer_types, window_fields, written_layer_types
from megatron.interop.huggingface.decoder_parts.rotary_decoder import RotaryDecoderFamily
from megatron.interop.huggingface.settings import Settings


class Qwen2Family(RotaryDecoderFamily):
    """Translate Qwen2 (``Qwen2ForCausalLM``)."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    has_qkv_bias = True
    default_positions = 32768
    default_groups = 32

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the windows that the later layers may have."""
        layers, num_full = settings.integer("num_hidden_layers"), settings.values.get("max_window_layers", 28)
        is_used = settings.switch("use_sliding_window", False) and settings.values.get("sliding_window", 1) is not None
        has_window = read_layer_types(settings, [is_used and layer >= num_full for layer in range(layers)])
        if any(has_window):
            settings.require("use_sliding_window", True, False, "layer_types has sliding_attention")
        return window_fields(settings, has_window, 4096)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config) | {"use_sliding_window": False}
        if any(config.layer_windows):
            num_full = config.layer_windows.index(next(filter(None, config.layer_windows)))
            settings |= written_layer_types(config) | {"use_sliding_window": True, "max_window_layers": num_full}
        return settings
