"""Nemotron (dense): zero-centered LayerNorm, squared ReLU, and partial RoPE."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    MLP_BIAS,
    RotaryDecoderFamily,
)
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class NemotronFamily(RotaryDecoderFamily):
    """Nemotron 3, Nemotron-4 and Minitron (``NemotronForCausalLM``)."""

    model_type = "nemotron"
    architecture = "NemotronForCausalLM"
    default_positions = 4096
    default_epsilon = 1e-5
    activation = ("hidden_act", "relu2", "squared_relu")
    epsilon_name = "norm_eps"
    bias_settings = MappingProxyType({ATTENTION_BIAS: False, MLP_BIAS: False})
    mlp_names = ("up_proj", "down_proj")

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with the fraction of rotated channels."""
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", 0.5)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms and initialization."""
        return {
            "normalization": "LayerNorm",
            "apply_layernorm_1p": True,
            "init_method_std": settings.number("initializer_range", 0.0134),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "head_dim": config.kv_channels,
            "partial_rotary_factor": config.rotary_percent,
        }
