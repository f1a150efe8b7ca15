"""Seed-OSS: Qwen2's layers with optional biases and a head dimension of its own."""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily, bias_fields
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class SeedOssFamily(RotaryDecoderFamily):
    """Seed-OSS (``SeedOssForCausalLM``)."""

    model_type = "seed_oss"
    architecture = "SeedOssForCausalLM"
    default_positions = 524288
    default_groups = 8
    default_head_dim = 128

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of biases and dropout."""
        return {
            **bias_fields(
                of_queries=settings.switch("attention_bias", True),
                of_output=settings.switch("attention_out_bias", False),
                of_mlp=settings.switch("mlp_bias", False),
            ),
            "hidden_dropout": settings.number("residual_dropout", 0.1),
            "attention_dropout": settings.number("attention_dropout", 0.1),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "attention_bias": config.has_qkv_bias,
            "attention_out_bias": config.has_proj_bias,
            "mlp_bias": config.add_bias_linear,
            "residual_dropout": config.hidden_dropout,
        }
