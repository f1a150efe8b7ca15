"""Phi-MoE: Mixtral's layers with LayerNorm, biases in attention, and SparseMixer-v2 routing as in evaluation."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    ExpertNames,
    RotaryDecoderFamily,
    expert_fields,
    window_fields,
    window_of_all_layers,
)
from megatron.checkpoint.formats.huggingface.rope import rope_object
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class PhimoeFamily(RotaryDecoderFamily):
    """Phi-MoE (``PhimoeForCausalLM``) with RoPE that is not scaled."""

    model_type = "phimoe"
    architecture = "PhimoeForCausalLM"
    default_positions = 131072
    default_groups = 8
    default_epsilon = 1e-5
    default_rotary_base = 1e6
    bias_settings = MappingProxyType({ATTENTION_BIAS: False})
    expert_names = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
    other_names = (("block_sparse_moe.gate.", "mlp.router."),)

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields; reject scaling, which transformers computes differently for this architecture."""
        scaling = rope_object(settings)
        kind = "default" if scaling is None else scaling.text("rope_type", scaling.text("type", "default"))
        if scaling is None or kind == "default":
            return super().read_rope(settings, positions)
        scaling.refuse(
            f"rope_type {kind!r} is not supported for this architecture; only default is: transformers computes "
            "longrope with the short factors at every length"
        )
        return {}

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms, the output bias, the sliding window and MoE; reject what has no equivalent."""
        settings.require("num_experts_per_tok", 2, 2, "transformers chooses two experts per token")
        settings.require_zero("input_jitter_noise", "noise in the input of experts is not supported")
        has_output_bias = settings.switch("lm_head_bias", False)
        if has_output_bias:
            settings.require("tie_word_embeddings", False, False, "an output layer with a bias has its own weight")
        experts = settings.integer("num_local_experts", settings.integer("num_experts", 16))
        if experts == 1:
            settings.refuse("num_local_experts is 1, but transformers chooses two experts per token; use 2 or more")
        has_window = settings.values.get("sliding_window") is not None
        return {
            "normalization": "LayerNorm",
            "add_output_bias": has_output_bias,
            "moe_router_score_function": "sparsemixer",
            "moe_router_sparsemixer_eps": settings.number("router_jitter_noise", 0.01),
            **window_fields(settings, [has_window] * settings.integer("num_hidden_layers"), None),
            **expert_fields(settings, max(experts, 2), settings.integer("intermediate_size"), 2),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "head_dim": config.kv_channels,
            "input_jitter_noise": 0.0,
            "intermediate_size": config.moe.moe_ffn_hidden_size,
            "lm_head_bias": config.add_output_bias,
            "num_experts_per_tok": config.moe.moe_router_topk,
            "num_local_experts": config.moe.num_experts,
            "router_jitter_noise": config.moe.moe_router_sparsemixer_eps,
            "sliding_window": window_of_all_layers(config),
        }
