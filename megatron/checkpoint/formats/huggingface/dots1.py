"""dots.llm1: Qwen3's attention with windows in some layers, and DeepSeek-V3's experts."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    read_layer_types,
    window_fields,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.deepseek_v3 import SharedExpertFamily, count_of
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class Dots1Family(SharedExpertFamily):
    """dots.llm1 (``Dots1ForCausalLM``)."""

    model_type = "dots1"
    architecture = "Dots1ForCausalLM"
    default_positions = 2048
    default_groups = 32
    has_mtp = False
    bias_settings = MappingProxyType({ATTENTION_BIAS: False})
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "moe_intermediate_size": 1408,
            "n_routed_experts": None,
            "n_shared_experts": None,
            "num_experts_per_tok": None,
            "norm_topk_prob": False,
            "first_k_dense_replace": 0,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 1.0,
        }
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of QK norms, MoE and the sliding windows of the later layers."""
        layers, num_full = settings.integer("num_hidden_layers"), count_of(settings, "max_window_layers", 62)
        has_windows = settings.values.get("sliding_window", 4096) is not None
        by_default = [has_windows and layer >= num_full for layer in range(min(layers, 100_000))]
        return {
            **self.experts_of(settings),
            **window_fields(settings, read_layer_types(settings, by_default), 4096),
            "qk_layernorm": True,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | written_layer_types(config)
