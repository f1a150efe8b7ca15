"""Qwen3: Qwen2's layers without biases, each head's query and key normalized."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.architectures.qwen2 import Qwen2Family
from megatron.interop.huggingface.settings import Settings


class Qwen3Family(Qwen2Family):
    """Translate Qwen3 (``Qwen3ForCausalLM``)."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    has_qkv_bias = False
    default_head_dim = 128

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the norms of queries and keys and the windows; note biases."""
        settings.require("attention_bias", False, False, "attention has no biases")
        return super().own_fields(settings) | {"qk_layernorm": True}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {"attention_bias": False}
