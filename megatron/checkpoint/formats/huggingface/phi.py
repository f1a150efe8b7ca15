"""Phi-1, Phi-1.5 and Phi-2: attention and MLP in parallel with one LayerNorm, partial RoPE, and biases everywhere."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily
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

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with the fraction of rotated channels."""
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", 0.5)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms, biases and dropout; reject QK norms and a tied output layer."""
        settings.require("qk_layernorm", False, False, "QK norms are not supported")
        settings.require("tie_word_embeddings", False, False, "an output layer with a bias must have its own weight")
        dropout = settings.number("resid_pdrop", 0.0)
        settings.require("embd_pdrop", dropout, 0.0, "the embedding uses the dropout of the layers, resid_pdrop")
        return {
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "add_output_bias": True,
            "use_parallel_residual": True,
            "shared_parallel_norm": True,
            "hidden_dropout": dropout,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "embd_pdrop": config.hidden_dropout,
            "partial_rotary_factor": config.rotary_percent,
            "qk_layernorm": False,
            "resid_pdrop": config.hidden_dropout,
        }
