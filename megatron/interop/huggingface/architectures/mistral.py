"""Mistral: Llama's layers, all of them with a sliding window or none."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.decoder_parts.layer_types import read_layer_types, window_fields, window_of_all_layers
from megatron.interop.huggingface.decoder_parts.rotary_decoder import RotaryDecoderFamily
from megatron.interop.huggingface.settings import Settings


class MistralFamily(RotaryDecoderFamily):
    """Translate Mistral (``MistralForCausalLM``)."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    default_positions = 131072
    default_groups = 8
    default_window: int | None = 4096

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the window."""
        has_window = settings.values.get("sliding_window", self.default_window) is not None
        alike = [has_window] * settings.integer("num_hidden_layers")
        if read_layer_types(settings, alike) != alike:
            settings.refuse(
                "layer_types is not the same for all layers, by which transformers takes a Mistral for a Ministral; "
                "leave it out if each layer has the window"
            )
        return window_fields(settings, alike, 4096)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {"sliding_window": window_of_all_layers(config)}
