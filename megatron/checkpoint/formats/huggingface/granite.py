"""Granite 3: Llama's layers with multipliers of embeddings, attention scores, residual branches and logits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    RotaryDecoderFamily,
    expert_fields,
    stacked_expert_links,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class GraniteFamily(RotaryDecoderFamily):
    """Granite 3 (``GraniteForCausalLM``)."""

    model_type = "granite"
    architecture = "GraniteForCausalLM"
    default_positions = 2048

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of multipliers and biases."""
        has_biases = settings.switch("attention_bias", False)
        settings.require("mlp_bias", has_biases, False, "it must be equal to attention_bias")
        return {"add_bias_linear": has_biases, **self.multipliers(settings)}

    def multipliers(self, settings: Settings) -> dict[str, Any]:
        return {
            "embedding_multiplier": settings.positive("embedding_multiplier", 1.0),
            "residual_multiplier": settings.positive("residual_multiplier", 1.0),
            "softmax_scale": settings.positive("attention_multiplier", 1.0),
            "logit_scale": 1 / settings.positive("logits_scaling", 1.0),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        # Of 49 the reciprocal of the reciprocal is not 49 again, but rounded it is.
        exact, rounded = 1 / config.logit_scale, round(1 / config.logit_scale, 12)
        return super().write_settings(config) | {
            "attention_bias": config.add_bias_linear,
            "attention_multiplier": config.score_scale,
            "embedding_multiplier": config.embedding_multiplier,
            "logits_scaling": rounded if rounded and 1 / rounded == config.logit_scale else exact,
            "mlp_bias": config.add_bias_linear,
            "residual_multiplier": config.residual_multiplier,
        }


_EXPERTS = "block_sparse_moe."


class GraniteMoeFamily(GraniteFamily):
    """Granite 3 MoE (``GraniteMoeForCausalLM``); experts are weighted with a softmax over the chosen ones."""

    model_type = "granitemoe"
    architecture = "GraniteMoeForCausalLM"
    expert_names = None
    other_names = (
        (f"{_EXPERTS}input_linear.weight", f"{_EXPERTS}experts.gate_up_proj"),
        (f"{_EXPERTS}output_linear.weight", f"{_EXPERTS}experts.down_proj"),
        (f"{_EXPERTS}router.layer.weight", f"{_EXPERTS}router.weight"),
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of multipliers and MoE; reject biases."""
        settings.require("attention_bias", False, False, "attention biases are not supported")
        experts, width = settings.integer("num_local_experts", 8), settings.integer("intermediate_size")
        return self.multipliers(settings) | expert_fields(settings, experts, width, 2)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config)
        del settings["mlp_bias"]
        return settings | {
            "attention_bias": False,
            "intermediate_size": config.moe.moe_ffn_hidden_size,
            "num_experts_per_tok": config.moe.moe_router_topk,
            "num_local_experts": config.moe.num_experts,
        }

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's router and experts, which are stacked in the files."""
        names = ("router.layer.weight", "input_linear.weight", "output_linear.weight")
        yield from stacked_expert_links(config, ours, f"{theirs}{_EXPERTS}", *names)
