"""Qwen2, Qwen2.5, Qwen2-MoE, Qwen3 and Qwen3-MoE.

Qwen2 has Llama's layers with QKV biases. Qwen3 has no biases and has QK norms per head. Qwen3-MoE has experts in some
or all layers. Qwen2-MoE has Qwen2's attention, and a shared expert with a gate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    RotaryDecoderFamily,
    expert_fields,
    is_unnormalized,
    layer_frequency,
    read_layer_types,
    shared_expert_links,
    window_fields,
    window_of_all_layers,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class Qwen2Family(RotaryDecoderFamily):
    """Qwen2 (``Qwen2ForCausalLM``)."""

    model_type = "qwen2"
    architecture = "Qwen2ForCausalLM"
    has_qkv_bias = True
    default_positions = 32768
    default_groups = 32

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the sliding windows, which the later layers may have."""
        layers, num_full = settings.integer("num_hidden_layers"), settings.values.get("max_window_layers", 28)
        is_used = settings.switch("use_sliding_window", False) and settings.values.get("sliding_window", 1) is not None
        has_window = read_layer_types(settings, [is_used and layer >= num_full for layer in range(layers)])
        if any(has_window):
            settings.require("use_sliding_window", True, False, "layer_types has sliding_attention")
        return window_fields(settings, has_window, 4096)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config) | {"use_sliding_window": False}
        if any(config.layer_windows):
            num_full = config.layer_windows.index(next(filter(None, config.layer_windows)))
            settings |= written_layer_types(config) | {"use_sliding_window": True, "max_window_layers": num_full}
        return settings


class Qwen3Family(Qwen2Family):
    """Qwen3 (``Qwen3ForCausalLM``)."""

    model_type = "qwen3"
    architecture = "Qwen3ForCausalLM"
    has_qkv_bias = False
    default_head_dim = 128
    bias_settings = MappingProxyType({ATTENTION_BIAS: False})

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of QK norms and sliding windows."""
        return super().own_fields(settings) | {"qk_layernorm": True}


class Qwen3MoEFamily(RotaryDecoderFamily):
    """Qwen3-MoE (``Qwen3MoeForCausalLM``)."""

    model_type = "qwen3_moe"
    architecture = "Qwen3MoeForCausalLM"
    default_positions = 32768
    default_groups = 4
    bias_settings = MappingProxyType({ATTENTION_BIAS: False})

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of QK norms, sliding window and MoE."""
        layers = settings.integer("num_hidden_layers")
        # transformers writes num_experts, publishers write num_local_experts.
        experts = settings.integer("num_experts", settings.integer("num_local_experts", 128))
        has_window = (
            settings.switch("use_sliding_window", False) and settings.values.get("sliding_window", 1) is not None
        )
        return {
            "qk_layernorm": True,
            "moe_layer_freq": layer_frequency(_have_experts(settings, layers)),
            "moe_router_pre_softmax": is_unnormalized(settings),
            **window_fields(settings, [has_window] * layers, 4096),
            **expert_fields(settings, experts, settings.integer("moe_intermediate_size", 768), 8),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        window = window_of_all_layers(config)
        return super().write_settings(config) | {
            "head_dim": config.kv_channels,
            "sliding_window": window,
            "use_sliding_window": window is not None,
            **_written_experts(config),
        }


class GatedSharedExpertFamily(RotaryDecoderFamily):
    """Base of the architectures whose experts are accompanied by a shared expert with a gate.

    ``expert_defaults`` are those of the architecture's configuration class.
    """

    expert_defaults: Mapping[str, Any]

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MoE and the shared expert."""
        return self.experts_of(settings)

    def experts_of(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of MoE and the shared expert."""
        usual = self.expert_defaults
        experts, width, shared = (
            settings.integer(name, usual[name])
            for name in ("num_experts", "moe_intermediate_size", "shared_expert_intermediate_size")
        )
        layers = min(settings.integer("num_hidden_layers"), 100_000)
        return {
            "moe_layer_freq": layer_frequency(_have_experts(settings, layers)),
            "moe_router_pre_softmax": not settings.switch("norm_topk_prob", usual["norm_topk_prob"]),
            "moe_shared_expert_intermediate_size": shared,
            "moe_shared_expert_gate": True,
            **expert_fields(settings, experts, width, usual["num_experts_per_tok"]),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        shared = config.moe.moe_shared_expert_intermediate_size
        return super().write_settings(config) | _written_experts(config) | {"shared_expert_intermediate_size": shared}

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's router, experts, shared expert and its gate."""
        yield from super().expert_layer_links(config, ours, theirs)
        yield from shared_expert_links(config, ours, theirs, "mlp.shared_expert")
        gate, their_gate = f"{ours}mlp.shared_experts.gate_weight", f"{theirs}mlp.shared_expert_gate.weight"
        yield whole(gate, their_gate, (1, config.hidden_size))


class Qwen2MoEFamily(GatedSharedExpertFamily):
    """Qwen1.5-MoE and Qwen2-MoE (``Qwen2MoeForCausalLM``)."""

    model_type = "qwen2_moe"
    architecture = "Qwen2MoeForCausalLM"
    default_positions = 32768
    default_groups = 16
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "num_experts": 60,
            "moe_intermediate_size": 1408,
            "shared_expert_intermediate_size": 5632,
            "num_experts_per_tok": 4,
            "norm_topk_prob": False,
        }
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of QKV biases, sliding windows, MoE and the shared expert."""
        layers = min(settings.integer("num_hidden_layers"), 100_000)
        is_used, last = settings.switch("use_sliding_window", False), settings.number("max_window_layers", 28)
        has_window = read_layer_types(settings, [is_used and i % 2 == 0 and i < last for i in range(layers)])
        if any(has_window):
            settings.require("use_sliding_window", True, False, "layer_types has sliding_attention")
        return {
            "add_qkv_bias": settings.switch("qkv_bias", True),
            **window_fields(settings, has_window, 4096),
            **self.experts_of(settings),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return (
            super().write_settings(config)
            | written_layer_types(config)
            | {"qkv_bias": config.has_qkv_bias, "use_sliding_window": any(config.layer_windows)}
        )


def _written_experts(config: GPTConfig) -> dict[str, Any]:
    """Return the settings of the MoE layers of a model."""
    return {
        "decoder_sparse_step": 1,
        "mlp_only_layers": [layer for layer, has_experts in enumerate(config.moe_layers) if not has_experts],
        "moe_intermediate_size": config.moe.moe_ffn_hidden_size,
        "norm_topk_prob": not config.moe.moe_router_pre_softmax,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.moe_router_topk,
    }


def _have_experts(settings: Settings, layers: int) -> list[bool]:
    """Return whether each layer has experts; reject a model in which none has."""
    step, dense = settings.integer("decoder_sparse_step", 1), settings.values.get("mlp_only_layers") or []
    if not isinstance(dense, list) or not all(type(layer) is int for layer in dense):
        settings.refuse(f"mlp_only_layers is {dense!r:.40}; a list of layer numbers is expected")
        dense = []
    found = [(layer + 1) % step == 0 and layer not in dense for layer in range(min(layers, 100_000))]
    if not any(found):
        settings.refuse(
            f"decoder_sparse_step {step} and mlp_only_layers leave no layer with experts; use the model type qwen3 "
            "for a dense model"
        )
    return found
