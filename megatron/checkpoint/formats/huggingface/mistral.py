"""Mistral, Ministral and Mixtral.

Mistral has Llama's layers with a sliding window in all layers or none, and Ministral in some layers. Ministral 3 has
YaRN and queries that grow with the position. Mixtral has experts instead of the MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ExpertNames,
    RotaryDecoderFamily,
    expert_fields,
    read_layer_types,
    window_fields,
    window_of_all_layers,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.rope import read_frequencies, rope_object
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


class MinistralFamily(MistralFamily):
    """Ministral (``MinistralForCausalLM``)."""

    model_type = "ministral"
    architecture = "MinistralForCausalLM"

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the sliding windows."""
        has_window = settings.values.get("sliding_window", self.default_window) is not None
        alike = [has_window] * min(settings.integer("num_hidden_layers"), 100_000)
        return window_fields(settings, read_layer_types(settings, alike), self.default_window)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | written_layer_types(config)


_BETA = "llama_4_scaling_beta"


class Ministral3Family(MistralFamily):
    """Language model of Ministral 3 (``Ministral3ForCausalLM``)."""

    model_type = "ministral3"
    architecture = "Ministral3ForCausalLM"
    default_positions = 262144
    default_head_dim = 128
    default_epsilon = 1e-5
    default_window = None
    default_rope: Mapping[str, Any] = MappingProxyType(
        {
            "rope_type": "yarn",
            "rope_theta": 1000000.0,
            "factor": 16.0,
            "original_max_position_embeddings": 16384,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            _BETA: 0.1,
        }
    )

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the fields of YaRN, with the growth of queries with the position."""
        scaling = rope_object(settings)
        if scaling is None:
            scaling = Settings(dict(self.default_rope), settings.place, settings.problems)
        reason = "queries grow with the position relative to YaRN's original_max_position_embeddings"
        scaling.require("rope_type" if "rope_type" in scaling.values else "type", "yarn", None, reason)
        fields = read_frequencies(settings, scaling, positions, settings.number("rope_theta", self.default_rotary_base))
        return fields | {"attention_temperature_beta": scaling.number(_BETA)}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config)
        if settings["rope_scaling"] is not None:
            settings["rope_scaling"][_BETA] = config.rope.attention_temperature_beta
        return settings


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
        settings.require_zero("router_jitter_noise", "noise in the router's input is not supported")
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
