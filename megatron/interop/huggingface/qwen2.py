"""Qwen2 and Qwen2.5: Llama's layers with biases on queries, keys and values."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.rotary_decoder import RotaryDecoderFamily
from megatron.interop.huggingface.settings import Settings


class Qwen2Family(RotaryDecoderFamily):
    """Translate Qwen2 (``Qwen2ForCausalLM``)."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    has_qkv_bias = True
    default_positions = 32768
    default_groups = 32

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Note a sliding window that a layer would use."""
        types = settings.values.get("layer_types")
        if types is not None:
            if any(kind != "full_attention" for kind in types):
                kinds = sorted({str(kind) for kind in types})
                settings.refuse(f"layer_types has {', '.join(kinds)}; every layer must have full_attention")
            return {}
        window = settings.values.get("sliding_window", 4096)
        layers, full_layers = settings.integer("num_hidden_layers"), settings.values.get("max_window_layers", 28)
        if settings.switch("use_sliding_window", False) and window is not None and layers > full_layers:
            settings.refuse(
                f"use_sliding_window is true: layers {full_layers} to {layers - 1} would attend to {window} tokens "
                "only; every layer must have full attention"
            )
        return {}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {"use_sliding_window": False}
