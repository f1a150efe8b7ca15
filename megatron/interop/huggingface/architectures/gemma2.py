"""Gemma 2: scaled embeddings, norms on both sides, capped scores and logits, every second layer with a window."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.decoder_parts.layer_types import read_layer_types, window_fields, written_layer_types
from megatron.interop.huggingface.decoder_parts.rotary_decoder import RotaryDecoderFamily
from megatron.interop.huggingface.settings import Settings


class Gemma2Family(RotaryDecoderFamily):
    """Translate Gemma 2 (``Gemma2ForCausalLM``)."""

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
        """Return the norms, the caps, the scale of the scores and the windows."""
        settings.require("attention_bias", False, False, "attention has no biases")
        settings.require("use_bidirectional_attention", False, False, "attention is causal")
        period = settings.integer("sliding_window_pattern", self.window_period)
        by_default = [(layer + 1) % period != 0 for layer in range(settings.integer("num_hidden_layers"))]
        return {
            "apply_layernorm_1p": True,
            "norm_placement": "both",
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
