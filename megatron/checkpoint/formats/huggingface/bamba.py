"""Bamba: Mamba-2 in most layers, attention with partial RoPE in the others."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import ATTENTION_BIAS, MLP_BIAS
from megatron.checkpoint.formats.huggingface.mamba_layers import MambaDecoderFamily
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import ATTENTION

_ROTATED = 0.5


class BambaFamily(MambaDecoderFamily):
    """Bamba (``BambaForCausalLM``)."""

    model_type = "bamba"
    architecture = "BambaForCausalLM"
    default_positions = 262144
    default_groups = 8
    default_epsilon = 1e-5
    final_norm = "final_layernorm"
    mlp_name = "feed_forward"
    bias_settings = MappingProxyType({ATTENTION_BIAS: False, MLP_BIAS: False})

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with the fraction of rotated channels, which only ``rope_parameters`` changes."""
        settings.require("partial_rotary_factor", _ROTATED, _ROTATED, "set it in rope_parameters")
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", _ROTATED)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of layers and z-loss."""
        layers, chosen = settings.integer("num_hidden_layers"), settings.values.get("attn_layer_indices") or []
        if not isinstance(chosen, list) or any(type(layer) is not int for layer in chosen):
            settings.refuse(f"attn_layer_indices is {chosen!r:.40}; a list of layer numbers is expected")
            chosen = []
        mixers = "".join("*" if layer in chosen else "M" for layer in range(min(layers, 100_000)))
        return {
            **self.layers_of(settings, mixers, "-"),
            "z_loss_coeff": settings.number("z_loss_coefficient", 0.0) or None,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config)
        if config.rotary_percent != _ROTATED:
            scaling = settings.pop("rope_scaling") or {"rope_type": "default"}
            rope = {"rope_theta": settings["rope_theta"], "partial_rotary_factor": config.rotary_percent}
            settings["rope_parameters"] = scaling | rope
        mixers = [parts.mixer for parts in config.layer_parts[::2]]
        return settings | {
            "attn_layer_indices": [layer for layer, mixer in enumerate(mixers) if mixer == ATTENTION],
            "z_loss_coefficient": config.z_loss_coeff or 0.0,
        }
