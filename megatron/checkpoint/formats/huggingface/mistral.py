"""Mistral and Mixtral.

Mistral has Llama's layers with a sliding window in all layers or none. Mixtral has experts instead of the MLP.
"""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ExpertNames,
    RotaryDecoderFamily,
    expert_fields,
    read_layer_types,
    window_fields,
    window_of_all_layers,
)
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class MistralFamily(RotaryDecoderFamily):
    """Mistral (``MistralForCausalLM``)."""

    model_type = "mistral"
    architecture = "MistralForCausalLM"
    default_positions = 131072
    default_groups = 8
    default_window: int | None = 4096

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the sliding window."""
        has_window = settings.values.get("sliding_window", self.default_window) is not None
        alike = [has_window] * settings.integer("num_hidden_layers")
        if read_layer_types(settings, alike) != alike:
            settings.refuse(
                "layer_types differs between layers, so transformers loads this Mistral as a Ministral; remove "
                "layer_types if all layers use the window"
            )
        return window_fields(settings, alike, 4096)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {"sliding_window": window_of_all_layers(config)}


class MixtralFamily(MistralFamily):
    """Mixtral (``MixtralForCausalLM``); experts are weighted with a softmax over the chosen ones."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    default_epsilon = 1e-5
    default_rotary_base = 1e6
    default_window = None
    expert_names = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the sliding window and MoE."""
        if settings.number("router_jitter_noise", 0.0):
            settings.refuse(
                "router_jitter_noise is not 0, but noise in the router's input is not supported; set it to 0"
            )
        experts = settings.integer("num_local_experts", 8)
        return super().own_fields(settings) | expert_fields(settings, experts, settings.integer("intermediate_size"), 2)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the model's values for Hugging Face's ``config.json``."""
        # With YaRN transformers does not compute head_dim from the other sizes.
        return super().write_settings(config) | {
            "head_dim": config.kv_channels,
            "intermediate_size": config.moe.moe_ffn_hidden_size,
            "num_experts_per_tok": config.moe.moe_router_topk,
            "num_local_experts": config.moe.num_experts,
        }
