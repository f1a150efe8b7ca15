"""Jais 2: Llama's layers with LayerNorm, squared ReLU, and biases everywhere."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import ATTENTION_BIAS, MLP_BIAS, RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.settings import Settings


class Jais2Family(RotaryDecoderFamily):
    """Jais 2 (``Jais2ForCausalLM``)."""

    model_type = "jais2"
    architecture = "Jais2ForCausalLM"
    default_positions = 8192
    default_epsilon = 1e-5
    activation = ("hidden_act", "relu2", "squared_relu")
    epsilon_name = "layer_norm_eps"
    mlp_names = ("up_proj", "down_proj")
    bias_settings = MappingProxyType({ATTENTION_BIAS: True, MLP_BIAS: True})

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        return {"normalization": "LayerNorm"}
