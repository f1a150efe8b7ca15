"""EXAONE 4: norms after attention and MLP, QK norms per head; the layers without a sliding window have no RoPE."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    RotaryDecoderFamily,
    no_rope_pattern,
    read_layer_types,
    window_fields,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class Exaone4Family(RotaryDecoderFamily):
    """EXAONE 4 (``Exaone4ForCausalLM``)."""

    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"
    default_positions = 2048
    default_groups = 32
    default_epsilon = 1e-5
    norm_names = (
        ("post_self_attn_layernorm", "post_attention_layernorm"),
        ("post_mlp_layernorm", "post_feedforward_layernorm"),
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the norms, the sliding windows and the layers without RoPE."""
        layers = min(settings.integer("num_hidden_layers"), 100_000)
        fields: dict[str, Any] = {"norm_placement": "post", "qk_layernorm": True}
        has_windows = settings.values.get("sliding_window", 4096) is not None
        by_default = [False] * layers
        if has_windows and settings.values.get("layer_types") is None:
            period = settings.integer("sliding_window_pattern", 4)
            by_default = [(layer + 1) % period != 0 for layer in range(layers)]
        has_window = read_layer_types(settings, by_default)
        if has_windows and not any(has_window) and not settings.problems:
            settings.refuse(
                "sliding_window is set, but no layer uses it, which leaves no layer with RoPE; set it to null"
            )
        # Without windows, every layer has RoPE.
        pattern = no_rope_pattern(has_window) if any(has_window) else None
        return fields | {"no_rope_freq": pattern, **window_fields(settings, has_window, 4096)}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | written_layer_types(config) | {"pad_token_id": None}
