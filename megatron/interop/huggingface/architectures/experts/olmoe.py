"""OLMoE: experts in every layer, and all query and key heads normalized together."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.decoder_parts.experts import expert_fields, is_unnormalized
from megatron.interop.huggingface.decoder_parts.rotary_decoder import RotaryDecoderFamily
from megatron.interop.huggingface.settings import Settings


class OlmoeFamily(RotaryDecoderFamily):
    """Translate OLMoE (``OlmoeForCausalLM``)."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    default_positions = 4096
    default_epsilon = 1e-5

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the norms of queries and keys and the experts; note biases and clipped projections."""
        settings.require("attention_bias", False, False, "attention has no biases")
        settings.require("clip_qkv", None, None, "queries, keys and values are not clipped")
        experts = settings.integer("num_experts", settings.integer("num_local_experts", 64))
        return {
            "qk_layernorm": True,
            "qk_layernorm_across_heads": True,
            "moe_router_pre_softmax": is_unnormalized(settings),
            **expert_fields(settings, experts, settings.integer("intermediate_size"), 8),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "attention_bias": False,
            "clip_qkv": None,
            "intermediate_size": config.moe_ffn_hidden_size,
            "norm_topk_prob": not config.moe_router_pre_softmax,
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.moe_router_topk,
            "pad_token_id": None,
        }
