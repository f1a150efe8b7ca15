"""GLM-4-MoE (GLM-4.5 to 4.7) and models with the same experts.

GLM-4-MoE has GQA with partial RoPE, DeepSeek-V3's experts, and multi-token prediction (MTP). GLM-4-MoE-Lite
(GLM-4.7-Flash) has DeepSeek-V3's MLA too. Solar Open has experts in all layers.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.deepseek_v3 import (
    DeepseekV3Family,
    SharedExpertFamily,
    typed_layers,
    written_layers,
)
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class Glm4MoeFamily(SharedExpertFamily):
    """GLM-4-MoE (``Glm4MoeForCausalLM``)."""

    model_type = "glm4_moe"
    architecture = "Glm4MoeForCausalLM"
    default_positions = 131072
    default_groups = 8
    default_epsilon = 1e-5
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "moe_intermediate_size": 1408,
            "n_routed_experts": 128,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        }
    )

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with the fraction of rotated channels."""
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", 0.5)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of QKV biases, QK norms, MoE and MTP."""
        return {
            **self.experts_of(settings),
            "add_qkv_bias": settings.switch("attention_bias", False),
            "qk_layernorm": settings.switch("use_qk_norm", False),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "attention_bias": config.has_qkv_bias,
            "partial_rotary_factor": config.rotary_percent,
            "use_qk_norm": config.qk_layernorm,
        }


class SolarOpenFamily(SharedExpertFamily):
    """Solar Open (``SolarOpenForCausalLM``)."""

    model_type = "solar_open"
    architecture = "SolarOpenForCausalLM"
    default_positions = 131072
    default_groups = 8
    default_head_dim = 128
    default_epsilon = 1e-5
    default_rotary_base = 1e6
    has_mtp = False
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "moe_intermediate_size": 1280,
            "n_routed_experts": 128,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        }
    )

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model configuration; its settings have no width of dense layers."""
        width = self.expert_defaults["moe_intermediate_size"]
        values = {"intermediate_size": settings.integer("moe_intermediate_size", width)}
        return super().read_config(settings.replaced(values))

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of QKV biases and MoE."""
        return {**self.experts_of(settings), "add_qkv_bias": settings.switch("attention_bias", False)}

    def layers_with_experts(self, settings: Settings) -> str:
        return "1"

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config) | {"attention_bias": config.has_qkv_bias}
        for name in ("intermediate_size", "first_k_dense_replace"):
            del settings[name]
        return settings


class Glm4MoeLiteFamily(DeepseekV3Family):
    """GLM-4-MoE-Lite (``Glm4MoeLiteForCausalLM``)."""

    model_type = "glm4_moe_lite"
    architecture = "Glm4MoeLiteForCausalLM"
    default_positions = 202752
    default_epsilon = 1e-5
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "moe_intermediate_size": 1536,
            "n_routed_experts": 64,
            "num_experts_per_tok": 4,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.8,
        }
    )
    latent_defaults: Mapping[str, Any] = MappingProxyType(
        {"q_lora_rank": 768, "kv_lora_rank": 512, "qk_nope_head_dim": 192, "v_head_dim": 256}
    )

    def layers_with_experts(self, settings: Settings) -> str:
        """Return the value of ``--moe-layer-freq``; transformers does not use ``first_k_dense_replace``."""
        return typed_layers(settings, 1)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config)
        del settings["first_k_dense_replace"]
        return settings | written_layers(config)
