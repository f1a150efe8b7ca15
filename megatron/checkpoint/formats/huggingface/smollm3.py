"""SmolLM3: Llama's layers, with every fourth layer without RoPE."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    MLP_BIAS,
    RotaryDecoderFamily,
    no_rope_pattern,
    read_layer_types,
    window_fields,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class SmolLM3Family(RotaryDecoderFamily):
    """SmolLM3 (``SmolLM3ForCausalLM``)."""

    model_type = "smollm3"
    architecture = "SmolLM3ForCausalLM"
    default_positions = 32768
    default_groups = 4
    default_rotary_base = 2e6
    is_tied_by_default = True
    bias_settings = MappingProxyType({ATTENTION_BIAS: False, MLP_BIAS: False})

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of layers without RoPE and of sliding windows."""
        layers = min(settings.integer("num_hidden_layers"), 100_000)
        has_rotary = _have_rotary(settings, layers)
        is_used = settings.switch("use_sliding_window", False) and settings.values.get("sliding_window") is not None
        has_window = read_layer_types(settings, [is_used and not has for has in has_rotary])
        if any(has_window):
            settings.require("use_sliding_window", True, False, "layer_types has sliding_attention")
        return {"no_rope_freq": no_rope_pattern(has_rotary), **window_fields(settings, has_window, None)}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return (
            super().write_settings(config)
            | written_layer_types(config)
            | {
                "no_rope_layers": [int(not is_without) for is_without in config.layers_without_rotary],
                "pad_token_id": None,
                "use_sliding_window": any(config.layer_windows),
            }
        )


def _have_rotary(settings: Settings, layers: int) -> list[bool]:
    """Return whether each layer has RoPE; ``no_rope_layers`` has a 1 for these layers, and may be longer."""
    interval = settings.integer("no_rope_layer_interval", 4)
    default = [(layer + 1) % interval != 0 for layer in range(layers)]
    given = settings.values.get("no_rope_layers")
    if given is None:
        return default
    if not (
        isinstance(given, list) and len(given) >= layers and all(type(has) is int and has in (0, 1) for has in given)
    ):
        settings.refuse(
            f"no_rope_layers is {given!r:.40}; a list of 1 and 0 for each of the {layers} layers is expected"
        )
        return default
    return [bool(has) for has in given[:layers]]
