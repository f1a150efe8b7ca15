"""GLM-4-MoE (GLM-4.5 to 4.7): GQA with partial RoPE, DeepSeek-V3's experts, and multi-token prediction (MTP)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.deepseek_v3 import SharedExpertFamily
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
