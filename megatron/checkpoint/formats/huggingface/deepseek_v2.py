"""DeepSeek-V2-Lite: MLA, and MoE with a shared expert and softmax scores that are not normalized."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import expert_fields
from megatron.checkpoint.formats.huggingface.deepseek_v3 import DeepseekV3Family
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class DeepseekV2Family(DeepseekV3Family):
    """DeepSeek-V2 with experts chosen among all (``DeepseekV2ForCausalLM``), as DeepSeek-V2-Lite."""

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    default_positions = 2048
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "first_k_dense_replace": 0,
            "routed_scaling_factor": 1.0,
        }
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MLA and MoE; reject unsupported settings."""
        settings.require("mlp_bias", False, False, "biases of the feed-forward layer are not supported")
        settings.require("scoring_func", "softmax", "softmax", "scores are a softmax over all experts")
        settings.require("topk_method", "greedy", "greedy", "groups ranked by their best expert are not supported")
        settings.require("norm_topk_prob", False, False, "transformers does not normalize the scores")
        settings.require("moe_layer_freq", 1, 1, "first_k_dense_replace determines which layers have experts")
        return {**self.experts_of(settings), **self.latent_fields(settings)}

    def experts_of(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MoE."""
        usual = self.expert_defaults
        width = settings.integer("moe_intermediate_size", usual["moe_intermediate_size"])
        experts = settings.integer("n_routed_experts", usual["n_routed_experts"])
        return {
            **expert_fields(settings, experts, width, settings.integer("num_experts_per_tok")),
            "moe_layer_freq": self.layers_with_experts(settings),
            "moe_shared_expert_intermediate_size": settings.integer("n_shared_experts", 2) * width,
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": settings.positive("routed_scaling_factor", 1.0),
            "moe_router_dtype": "fp32",
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config)
        for name in ("num_nextn_predict_layers", "rope_interleave"):
            del settings[name]
        return settings | {
            "mlp_bias": False,
            "n_group": None,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_group": None,
            "topk_method": "greedy",
        }
