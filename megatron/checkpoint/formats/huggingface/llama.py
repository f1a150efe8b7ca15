"""Llama, with the RoPE scaling of Llama 3.1."""

from __future__ import annotations

from types import MappingProxyType

from megatron.checkpoint.formats.huggingface.decoder_layers import ATTENTION_BIAS, MLP_BIAS, RotaryDecoderFamily


class LlamaFamily(RotaryDecoderFamily):
    """Llama (``LlamaForCausalLM``)."""

    model_type = "llama"
    architecture = "LlamaForCausalLM"
    default_positions = 2048
    bias_settings = MappingProxyType({ATTENTION_BIAS: False, MLP_BIAS: False})
