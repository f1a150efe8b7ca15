"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel with one LayerNorm, partial RoPE, and biases everywhere."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.family import dropout_fields
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class PhiFamily(RotaryDecoderFamily):
    """Phi-1, Phi-1.5 and Phi-2 (``PhiForCausalLM``), whose output layer has a bias too."""

    model_type = "phi"
    architecture = "PhiForCausalLM"
    default_positions = 2048
    default_epsilon = 1e-5
    activation = ("hidden_act", "gelu_new", "gelu")
    epsilon_name = "layer_norm_eps"
    attention_output = "dense"
    final_norm = "final_layernorm"
    mlp_names = ("fc1", "fc2")
    head_norm_names = MappingProxyType({"q": "q_layernorm", "k": "k_layernorm"})

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with the fraction of rotated channels."""
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", 0.5)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms, biases and dropout; reject a tied output layer."""
        settings.require("tie_word_embeddings", False, False, "an output layer with a bias must have its own weight")
        return {
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "add_output_bias": True,
            "use_parallel_residual": True,
            "shared_parallel_norm": True,
            "qk_layernorm": settings.switch("qk_layernorm", False),
            **dropout_fields(settings, "resid_pdrop", "embd_pdrop", 0.0),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "embd_pdrop": config.dropout_of_embeddings,
            "partial_rotary_factor": config.rotary_percent,
            "qk_layernorm": config.qk_layernorm,
            "resid_pdrop": config.hidden_dropout,
        }
