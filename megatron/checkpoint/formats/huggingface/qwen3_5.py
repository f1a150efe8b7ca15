"""Qwen3.5 (text only): Qwen3-Next with separate projections in gated delta-net, dense or with experts in all layers."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.qwen import GatedSharedExpertFamily
from megatron.checkpoint.formats.huggingface.qwen3_next import DeltaNetFamily
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class Qwen3_5Family(DeltaNetFamily):
    """Language model of Qwen3.5 (``Qwen3_5ForCausalLM``)."""

    model_type = "qwen3_5_text"
    architecture = "Qwen3_5ForCausalLM"
    multimodal_architecture = "Qwen3_5ForConditionalGeneration"
    other_names = (("model.", "model.language_model."),)
    default_groups: int | None = 4
    mtp_setting = "mtp_num_hidden_layers"

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of Qwen3-Next's layers; reject attention without a gate."""
        settings.require("attn_output_gate", True, True, "attention has an output gate")
        return super().own_fields(settings)


class Qwen3_5MoEFamily(Qwen3_5Family, GatedSharedExpertFamily):
    """Language model of Qwen3.5 with experts (``Qwen3_5MoeForCausalLM``)."""

    model_type = "qwen3_5_moe_text"
    architecture = "Qwen3_5MoeForCausalLM"
    multimodal_architecture = "Qwen3_5MoeForConditionalGeneration"
    default_groups = 2
    default_ffn_size = 512
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "num_experts": 256,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        }
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of Qwen3.5's layers; reject settings of Qwen3-Next that have no effect here."""
        settings.require("norm_topk_prob", True, True, "scores are always normalized to sum 1")
        settings.require("decoder_sparse_step", 1, 1, "all layers have experts")
        settings.require("mlp_only_layers", [], [], "all layers have experts")
        return super().own_fields(settings)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config)
        for name in ("decoder_sparse_step", "intermediate_size", "mlp_only_layers", "norm_topk_prob"):
            del settings[name]
        return settings
