"""ERNIE 4.5: Llama's layers with interleaved RoPE and optional biases, dense or with experts in some layers."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    RotaryDecoderFamily,
    expert_fields,
    layer_frequency,
    shared_expert_links,
)
from megatron.checkpoint.formats.huggingface.deepseek_v3 import count_of
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box


class Ernie4_5Family(RotaryDecoderFamily):
    """ERNIE 4.5 without experts (``Ernie4_5ForCausalLM``)."""

    model_type = "ernie4_5"
    architecture = "Ernie4_5ForCausalLM"
    default_positions = 131072
    default_groups = 2
    default_head_dim: int | None = 128
    default_epsilon = 1e-5
    default_rotary_base = 500000.0
    is_tied_by_default = True

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of biases and interleaved RoPE; transformers has no dropout here."""
        settings.require("attention_dropout", 0.0, 0.0, "the architecture has no dropout")
        return {"add_bias_linear": settings.switch("use_bias", False), "rotary_interleaved": True}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {"use_bias": config.add_bias_linear}


_BIAS = "moe_statics.e_score_correction_bias"


class Ernie4_5MoeFamily(Ernie4_5Family):
    """ERNIE 4.5 with experts (``Ernie4_5_MoeForCausalLM``)."""

    model_type = "ernie4_5_moe"
    architecture = "Ernie4_5_MoeForCausalLM"
    default_groups = 4
    default_head_dim = None
    other_names = ((f"mlp.{_BIAS}", f"mlp.gate.{_BIAS}"),)
    setting_names: Mapping[str, str] = MappingProxyType(
        {"moe_k": "num_experts_per_tok", "num_experts": "moe_num_experts"}
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MoE too; reject biases, which experts do not have, and a single expert per token."""
        settings.require("use_bias", False, False, "biases of layers with experts are not supported")
        settings.require("moe_norm_min", 1e-12, 1e-12, "it would change the weights of experts with tiny scores")
        width, experts = settings.integer("moe_intermediate_size", 1536), settings.integer("moe_num_experts", 64)
        fields = expert_fields(settings, experts, width, 6)
        if fields["moe_router_topk"] == 1:
            settings.refuse("moe_k is 1; use 2 or more: a single expert has the weight 1 in transformers")
        shared = count_of(settings, "moe_num_shared_experts", 2)
        return {
            **super().own_fields(settings),
            **fields,
            "moe_layer_freq": _layers_with_experts(settings),
            "moe_shared_expert_intermediate_size": shared * width or None,
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        moe = config.moe
        numbers = [layer + 1 for layer, has_experts in enumerate(config.moe_layers) if has_experts] or [1]
        shared = (moe.moe_shared_expert_intermediate_size or 0) // max(moe.moe_ffn_hidden_size, 1)
        return self.with_own_names(super().write_settings(config)) | {
            "moe_intermediate_size": moe.moe_ffn_hidden_size,
            "moe_k": moe.moe_router_topk,
            "moe_layer_end_index": numbers[-1] - 1,
            "moe_layer_interval": math.gcd(*numbers),
            "moe_layer_start_index": numbers[0] - 1,
            "moe_norm_min": 1e-12,
            "moe_num_experts": moe.num_experts,
            "moe_num_shared_experts": shared,
        }

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of router, experts, shared experts and the router's expert bias, a row in the files."""
        yield from super().expert_layer_links(config, ours, theirs)
        experts = config.moe.num_experts or 0
        bias = whole(f"{ours}mlp.router.expert_bias", f"{theirs}mlp.{_BIAS}", (experts,))
        yield replace(bias, foreign_box=Box((0, 0), (1, experts)), foreign_ones=(1, 0))
        if config.moe.moe_shared_expert_intermediate_size is not None:
            yield from shared_expert_links(config, ours, theirs)


def _layers_with_experts(settings: Settings) -> str:
    """Return the value of ``--moe-layer-freq``; reject a model whose layers are all dense."""
    layers = min(settings.integer("num_hidden_layers"), 100_000)
    first, interval = count_of(settings, "moe_layer_start_index", 1), settings.integer("moe_layer_interval", 1)
    last = settings.values.get("moe_layer_end_index", -1)
    last = layers - 1 if last == -1 else count_of(settings, "moe_layer_end_index", layers - 1)
    has_experts = [(layer + 1) % interval == 0 and first <= layer <= last for layer in range(layers)]
    if not any(has_experts) and not settings.problems:
        settings.refuse(f"none of the {layers} layers has experts by moe_layer_start_index {first}, _end_index {last}")
    return layer_frequency(has_experts)
