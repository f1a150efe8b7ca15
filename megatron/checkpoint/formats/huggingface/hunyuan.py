"""Hunyuan, dense and MoE: Llama's layers with QK norms per head after RoPE, and NTK-aware scaling of RoPE's base."""

from __future__ import annotations

from collections.abc import Iterator
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    ExpertNames,
    RotaryDecoderFamily,
    expert_fields,
    shared_expert_links,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink
from megatron.checkpoint.formats.huggingface.rope import read_ntk_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class HunYuanDenseV1Family(RotaryDecoderFamily):
    """Hunyuan 0.5B to 7B (``HunYuanDenseV1ForCausalLM``)."""

    model_type = "hunyuan_v1_dense"
    architecture = "HunYuanDenseV1ForCausalLM"
    default_positions = 2048
    default_epsilon = 1e-5
    bias_settings = MappingProxyType({ATTENTION_BIAS: False})
    head_norm_names = MappingProxyType({"q": "query_layernorm", "k": "key_layernorm"})

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        return read_ntk_rope(settings, positions, self.default_rotary_base)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of QK norms."""
        return {"qk_layernorm": True, "qk_layernorm_after_rope": True}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config)
        if config.rotary_ntk_alpha != 1.0:
            settings["rope_scaling"] = {"rope_type": "dynamic", "factor": 1.0, "alpha": config.rotary_ntk_alpha}
        return settings | {"head_dim": config.kv_channels, "pad_token_id": None}


class HunYuanMoEV1Family(HunYuanDenseV1Family):
    """Hunyuan A13B (``HunYuanMoEV1ForCausalLM``), with a shared expert of the routed experts' width."""

    model_type = "hunyuan_v1_moe"
    architecture = "HunYuanMoEV1ForCausalLM"
    expert_names = ExpertNames(router="mlp.gate.wg")
    other_names = (("mlp.gate.", "mlp.gate.wg."),)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of attention and MoE; reject layers that differ in the number of experts."""
        layers = settings.integer("num_hidden_layers")
        chosen = settings.values.get("num_experts_per_tok", settings.values.get("moe_topk"))
        if isinstance(chosen, list) and len(chosen) >= layers and chosen[:layers] == chosen[:1] * layers:
            chosen = chosen[0]
        given = settings.replaced({"num_experts_per_tok": chosen})
        experts = settings.integer("num_local_experts", settings.integer("num_experts", 1))
        width = settings.integer("intermediate_size")
        return super().own_fields(settings) | {
            "moe_shared_expert_intermediate_size": width,
            "moe_router_dtype": "fp32",
            **expert_fields(given, experts, width, 1),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {
            "intermediate_size": config.moe.moe_ffn_hidden_size,
            "moe_topk": config.moe.moe_router_topk,
            "num_experts": config.moe.num_experts,
        }

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of router, experts and shared expert."""
        yield from super().expert_layer_links(config, ours, theirs)
        if config.moe.moe_shared_expert_intermediate_size is not None:
            yield from shared_expert_links(config, ours, theirs, "mlp.shared_mlp")
