"""Mixtral: Mistral's layers with experts in place of the feed-forward."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.architectures.mistral import MistralFamily
from megatron.interop.huggingface.decoder_parts.experts import ExpertNames, expert_fields
from megatron.interop.huggingface.settings import Settings


class MixtralFamily(MistralFamily):
    """Translate Mixtral (``MixtralForCausalLM``): a softmax over the chosen experts weighs them."""

    model_type = "mixtral"
    architecture = "MixtralForCausalLM"
    default_epsilon = 1e-5
    default_rotary_base = 1e6
    default_window = None
    expert_names = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the window and the experts."""
        if settings.number("router_jitter_noise", 0.0):
            settings.refuse("router_jitter_noise is not 0: what goes into the router has no noise")
        experts = settings.integer("num_local_experts", 8)
        return super().own_fields(settings) | expert_fields(settings, experts, settings.integer("intermediate_size"), 2)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        # transformers takes no width of a head for one that follows from the others, where YaRN stretches positions.
        return super().write_settings(config) | {
            "head_dim": config.kv_channels,
            "intermediate_size": config.moe_ffn_hidden_size,
            "num_experts_per_tok": config.moe_router_topk,
            "num_local_experts": config.num_experts,
        }
