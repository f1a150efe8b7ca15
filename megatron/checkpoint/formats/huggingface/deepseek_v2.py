"""DeepSeek-V2: MLA, and MoE with a shared expert and softmax scores that are not normalized."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import expert_fields
from megatron.checkpoint.formats.huggingface.deepseek_v3 import DeepseekV3Family
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig

_GREEDY, _LIMITED = "greedy", "group_limited_greedy"


class DeepseekV2Family(DeepseekV3Family):
    """DeepSeek-V2 (``DeepseekV2ForCausalLM``): experts of the best groups, or among all as in DeepSeek-V2-Lite."""

    model_type = "deepseek_v2"
    architecture = "DeepseekV2ForCausalLM"
    default_positions = 2048
    group_score_topk = 1
    has_mtp = False
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
        settings.require("norm_topk_prob", False, False, "transformers does not normalize the scores")
        settings.require("moe_layer_freq", 1, 1, "first_k_dense_replace determines which layers have experts")
        return {**self.experts_of(settings), **self.latent_fields(settings)}

    def experts_of(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MoE."""
        usual = self.expert_defaults
        width = settings.integer("moe_intermediate_size", usual["moe_intermediate_size"])
        experts = settings.integer("n_routed_experts", usual["n_routed_experts"])
        fields = expert_fields(settings, experts, width, settings.integer("num_experts_per_tok"))
        method = settings.text("topk_method", _GREEDY)
        if method == _LIMITED:
            groups, of_token = settings.integer("n_group"), settings.integer("topk_group")
            fields |= self.group_fields(settings, experts, fields["moe_router_topk"], groups, of_token)
        elif method != _GREEDY:
            settings.refuse(f"topk_method is {method!r}; supported values are {_GREEDY} and {_LIMITED}")
        return {
            **fields,
            "moe_layer_freq": self.layers_with_experts(settings),
            "moe_shared_expert_intermediate_size": settings.integer("n_shared_experts", 2) * width,
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": settings.positive("routed_scaling_factor", 1.0),
            "moe_router_dtype": "fp32",
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config)
        del settings["rope_interleave"]
        return settings | {
            "mlp_bias": False,
            "n_group": config.moe.moe_router_num_groups,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "topk_group": config.moe.moe_router_group_topk,
            "topk_method": _GREEDY if config.moe.moe_router_num_groups is None else _LIMITED,
        }
