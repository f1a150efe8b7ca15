"""Gemma 1, 2 and 3 (text only).

Gemma 1 has Llama's layers with scaled embeddings and GeGLU. Gemma 2 adds norms after each sublayer, soft-capped scores
and logits, and a sliding window in every second layer. Gemma 3 has QK norms, five sliding-window layers per global
layer, and a RoPE base for each kind of layer.
"""

from __future__ import annotations

from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    FULL,
    SLIDING,
    RotaryDecoderFamily,
    read_layer_types,
    window_fields,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.rope import checked_base, read_frequencies
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class GemmaFamily(RotaryDecoderFamily):
    """Gemma 1 (``GemmaForCausalLM``)."""

    model_type = "gemma"
    architecture = "GemmaForCausalLM"
    default_positions = 8192
    default_groups = 16
    default_head_dim = 256
    is_tied_by_default = True
    activation = ("hidden_act", "gelu_pytorch_tanh", "geglu")

    def read_config(self, settings: Settings) -> GPTConfig:
        """Return the model configuration; transformers uses the tanh approximation for ``gelu`` too."""
        if settings.values.get("hidden_act") == "gelu":
            settings = settings.replaced({"hidden_act": "gelu_pytorch_tanh"})
        return super().read_config(settings)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms and embedding; reject biases and attention in both directions."""
        settings.require("attention_bias", False, False, "attention biases are not supported")
        settings.require("use_bidirectional_attention", False, False, "attention is causal")
        tanh = "gelu_pytorch_tanh"
        settings.require("hidden_activation", tanh, tanh, "transformers 4 uses it instead of hidden_act")
        return {"apply_layernorm_1p": True, "scale_embeddings": True}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        return super().write_settings(config) | {"attention_bias": False, "head_dim": config.kv_channels}


class Gemma2Family(RotaryDecoderFamily):
    """Gemma 2 (``Gemma2ForCausalLM``)."""

    model_type = "gemma2"
    architecture = "Gemma2ForCausalLM"
    default_positions = 8192
    default_groups = 4
    default_head_dim = 256
    is_tied_by_default = True
    activation = ("hidden_activation", "gelu_pytorch_tanh", "geglu")
    norm_names = (
        ("input_layernorm", "input_layernorm"),
        ("post_self_attn_layernorm", "post_attention_layernorm"),
        ("pre_mlp_layernorm", "pre_feedforward_layernorm"),
        ("post_mlp_layernorm", "post_feedforward_layernorm"),
    )
    window_period = 2
    default_attention_cap: float | None = 50.0
    default_logit_cap: float | None = 30.0

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms, soft caps, score scale and sliding windows."""
        settings.require("attention_bias", False, False, "attention biases are not supported")
        settings.require("use_bidirectional_attention", False, False, "attention is causal")
        period = settings.integer("sliding_window_pattern", self.window_period)
        by_default = [(layer + 1) % period != 0 for layer in range(settings.integer("num_hidden_layers"))]
        return {
            "apply_layernorm_1p": True,
            "norm_placement": "sandwich",
            "scale_embeddings": True,
            "query_pre_attn_scalar": settings.integer("query_pre_attn_scalar", 256),
            "attn_logit_softcapping": settings.positive_or_none("attn_logit_softcapping", self.default_attention_cap),
            "final_logit_softcapping": settings.positive_or_none("final_logit_softcapping", self.default_logit_cap),
            **window_fields(settings, read_layer_types(settings, by_default), 4096),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "attention_bias": False,
            "attn_logit_softcapping": config.attn_logit_softcapping,
            "final_logit_softcapping": config.final_logit_softcapping,
            "query_pre_attn_scalar": config.score_scalar,
            **written_layer_types(config),
        }


class Gemma3Family(Gemma2Family):
    """Language model of Gemma 3 (``Gemma3ForCausalLM``)."""

    model_type = "gemma3_text"
    architecture = "Gemma3ForCausalLM"
    default_positions = 131072
    window_period = 6
    default_attention_cap = None
    default_logit_cap = None

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of Gemma 2, the QK norms and the RoPE base of sliding-window layers."""
        settings.require("attn_logit_softcapping", None, None, "transformers does not apply it in this family")
        fields = super().own_fields(settings) | {"qk_layernorm": True}
        if "window_size" in fields:
            base = settings.number("rope_local_base_freq", 10000.0)
            newer = _rope_of(settings, SLIDING)
            if newer is not None:
                newer.require("rope_type", "default", "default", "sliding-window layers use unscaled RoPE frequencies")
                base = newer.number("rope_theta", base)
            fields["rotary_base_local"] = checked_base(settings, base, "rope_theta of sliding-window layers")
        return fields

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields of the global layers."""
        scaling, older = _rope_of(settings, FULL), settings.inner("rope_scaling")
        if older is not None:
            # If a folder has both, `rope_scaling` overrides `rope_parameters`.
            newer = {} if scaling is None else scaling.values
            scaling = Settings({**newer, **older.values}, older.place, settings.problems)
        return read_frequencies(settings, scaling, positions, settings.number("rope_theta", 1e6))

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        base = config.rotary_base if config.rotary_base_local is None else config.rotary_base_local
        return super().write_settings(config) | {"rope_local_base_freq": float(base)}


def _rope_of(settings: Settings, kind: str) -> Settings | None:
    """Return the entry of ``rope_parameters`` for one kind of layer, if there is one."""
    both = settings.inner("rope_parameters")
    return None if both is None else both.inner(kind)
