"""OLMo 1, 2 and 3, OLMoE and FlexOlmo.

OLMo 1 has Llama's layers with norms without parameters.
OLMo 2 has Llama's layers with norms after attention and MLP, and a QK norm over all heads together. OLMo 3 has sliding
windows in three of four layers, which do not use RoPE scaling. OLMoE has experts in every layer.
"""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    FULL,
    SLIDING,
    RotaryDecoderFamily,
    expert_fields,
    is_unnormalized,
    read_layer_types,
    window_fields,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.rope import checked_base, read_frequencies, write_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class OlmoFamily(RotaryDecoderFamily):
    """OLMo 1 (``OlmoForCausalLM``), whose norms have an epsilon of 1e-5."""

    model_type = "olmo"
    architecture = "OlmoForCausalLM"
    default_positions = 2048
    norm_names = ()

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms and clipping; reject biases."""
        settings.require("attention_bias", False, False, "attention biases are not supported")
        return {
            "normalization": "LayerNorm",
            "norm_parameters": "none",
            "norm_epsilon": 1e-5,
            "clip_qkv": settings.positive_or_none("clip_qkv", None),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config)
        del settings[self.epsilon_name]
        return settings | {"attention_bias": False, "clip_qkv": config.clip_qkv, "pad_token_id": None}


class Olmo2Family(RotaryDecoderFamily):
    """OLMo 2 (``Olmo2ForCausalLM``)."""

    model_type = "olmo2"
    architecture = "Olmo2ForCausalLM"
    default_positions = 2048
    default_epsilon = 1e-5
    norm_names = (
        ("post_self_attn_layernorm", "post_attention_layernorm"),
        ("post_mlp_layernorm", "post_feedforward_layernorm"),
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the norms; reject biases."""
        settings.require("attention_bias", False, False, "attention biases are not supported")
        return {"norm_placement": "post", "qk_layernorm": True, "qk_layernorm_across_heads": True}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {"attention_bias": False}


class Olmo3Family(Olmo2Family):
    """OLMo 3 (``Olmo3ForCausalLM``)."""

    model_type = "olmo3"
    architecture = "Olmo3ForCausalLM"
    default_rotary_base = 500000.0

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields of the global layers.

        The newer form of the settings has an object for each kind of layer. The older form has a single base, and its
        ``rope_scaling`` applies only to the global layers.
        """
        both = settings.inner("rope_parameters")
        if both is not None and not {FULL, SLIDING} & set(both.values):
            both.refuse(f"it has neither {FULL} nor {SLIDING}; set an object for each kind of layer")
        of_full = _merged(settings, both)
        if of_full is not None:
            of_full.require("partial_rotary_factor", 1.0, 1.0, "partial rotary embeddings are not supported")
        return read_frequencies(settings, of_full, positions, settings.number("rope_theta", self.default_rotary_base))

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of OLMo 2, the sliding windows, and the RoPE base of sliding-window layers."""
        layers = min(settings.integer("num_hidden_layers"), 100_000)
        has_window = read_layer_types(settings, [(layer + 1) % 4 != 0 for layer in range(layers)])
        fields = super().own_fields(settings) | window_fields(settings, has_window, 4096)
        if "window_size" not in fields:
            return fields
        both, usual = settings.inner("rope_parameters"), self.default_rotary_base
        of_windows = None if both is None else both.inner(SLIDING)
        base = settings.number("rope_theta", usual)
        if of_windows is not None:
            of_windows.require("rope_type", "default", "default", "sliding-window layers use unscaled RoPE frequencies")
            of_windows.require("partial_rotary_factor", 1.0, 1.0, "partial rotary embeddings are not supported")
        if of_windows is not None and of_windows.values.get("rope_theta") is not None:
            base = of_windows.number("rope_theta")
        elif base != usual:
            settings.refuse(
                f"rope_theta is {base}, which releases of transformers interpret differently for sliding-window "
                f"layers; set rope_parameters with a rope_theta for {SLIDING}"
            )
        full = Olmo3Family.read_rope(self, Settings(settings.values, settings.place), layers)
        own = checked_base(settings, base, "rope_theta of sliding-window layers")
        is_common = full == {"rotary_base": own}
        return fields | {"rotary_base_local": None if is_common else own}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model, with RoPE in the older and the newer form."""
        rope = write_rope(config)
        base = rope["rope_theta"]
        own = config.rotary_base if config.rotary_base_local is None else config.rotary_base_local
        return (
            super().write_settings(config)
            | written_layer_types(config)
            | {
                "rope_parameters": {
                    FULL: {"rope_theta": base, **(rope["rope_scaling"] or {"rope_type": "default"})},
                    SLIDING: {"rope_theta": float(own), "rope_type": "default"},
                }
            }
        )


def _merged(settings: Settings, both: Settings | None) -> Settings | None:
    """Return the RoPE settings of the global layers; values of the older form override the newer form."""
    newer, older = None if both is None else both.inner(FULL), settings.inner("rope_scaling")
    if newer is None or older is None:
        return newer or older
    return Settings({**newer.values, **older.values}, newer.place, settings.problems)


class FlexOlmoFamily(Olmo2Family):
    """FlexOlmo (``FlexOlmoForCausalLM``): OLMo 2 with experts in every layer."""

    model_type = "flex_olmo"
    architecture = "FlexOlmoForCausalLM"
    default_positions = 4096
    default_epsilon = 1e-6
    default_rotary_base = 500000.0

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms and MoE; reject biases."""
        experts = settings.integer("num_experts", settings.integer("num_local_experts", 7))
        return super().own_fields(settings) | {
            "moe_router_pre_softmax": is_unnormalized(settings),
            **expert_fields(settings, experts, settings.integer("intermediate_size"), 5),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | _written_experts(config)


class OlmoeFamily(RotaryDecoderFamily):
    """OLMoE (``OlmoeForCausalLM``)."""

    model_type = "olmoe"
    architecture = "OlmoeForCausalLM"
    default_positions = 4096
    default_epsilon = 1e-5

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of QK norms and MoE; reject biases and clipped QKV projections."""
        settings.require("attention_bias", False, False, "attention biases are not supported")
        settings.require("clip_qkv", None, None, "clipping of queries, keys and values is not supported")
        experts = settings.integer("num_experts", settings.integer("num_local_experts", 64))
        return {
            "qk_layernorm": True,
            "qk_layernorm_across_heads": True,
            "moe_router_pre_softmax": is_unnormalized(settings),
            **expert_fields(settings, experts, settings.integer("intermediate_size"), 8),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "attention_bias": False,
            "clip_qkv": None,
            **_written_experts(config),
        }


def _written_experts(config: GPTConfig) -> dict[str, Any]:
    """Return the settings of the MoE layers of a model."""
    return {
        "intermediate_size": config.moe.moe_ffn_hidden_size,
        "norm_topk_prob": not config.moe.moe_router_pre_softmax,
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.moe_router_topk,
        "pad_token_id": None,
    }
