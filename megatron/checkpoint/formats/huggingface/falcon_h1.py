"""Falcon-H1: attention and Mamba-2 in parallel in every layer, with a multiplier of every part."""

from __future__ import annotations

import math
from typing import Any

from megatron.checkpoint.formats.huggingface.mamba_layers import MambaDecoderFamily
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import MAMBA

_BIASES = ("attention_bias", "mlp_bias", "projectors_bias", "mamba_proj_bias")


class FalconH1Family(MambaDecoderFamily):
    """Falcon-H1 (``FalconH1ForCausalLM``).

    A multiplier of the input of a linear layer without bias is combined with the multiplier of its output, and the
    multiplier of keys with the softmax scale.
    """

    model_type = "falcon_h1"
    architecture = "FalconH1ForCausalLM"
    default_positions, default_groups, default_epsilon = 8192, 8, 1e-5
    final_norm = "final_layernorm"
    mlp_name = "feed_forward"

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of layers, multipliers and the norm of Mamba-2; reject biases of linear layers."""
        for name in _BIASES:
            settings.require(name, False, False, "biases of linear layers are not supported")
        is_before = settings.switch("mamba_norm_before_gate", True)
        norm = ("before-gate" if is_before else "after-gate") if settings.switch("mamba_rms_norm", False) else "none"
        read, heads = settings.positive, settings.integer("num_attention_heads")
        head_dim = settings.integer("head_dim", settings.integer("hidden_size") // heads)
        into_attention, into_mamba = read("attention_in_multiplier", 1.0), read("ssm_in_multiplier", 1.0)
        of_scores = read("key_multiplier", 1.0) * into_attention * into_attention
        gate, down = settings.positive_numbers("mlp_multipliers", (1.0, 1.0))
        of_mamba = settings.positive_numbers("ssm_multipliers", (1.0,) * 5)
        return {
            **self.layers_of(settings, "P" * min(settings.integer("num_hidden_layers"), 100_000), "-"),
            "mamba_norm": norm,
            "softmax_scale": head_dim**-0.5 * of_scores,
            "mamba_multipliers": tuple(into_mamba * each for each in of_mamba),
            "parallel_attention_multiplier": into_attention * read("attention_out_multiplier", 1.0),
            "parallel_mamba_multiplier": read("ssm_out_multiplier", 1.0),
            "mlp_gate_multiplier": gate,
            "mlp_output_multiplier": down,
            "embedding_multiplier": read("embedding_multiplier", 1.0),
            "logit_scale": read("lm_head_multiplier", 1.0),
        }

    def inner_width(self, settings: Settings) -> int:
        """Return the width of all heads of Mamba-2 together, which this architecture states."""
        stated = settings.values.get("mamba_d_ssm", 1024)
        return super().inner_width(settings) if stated is None else settings.integer("mamba_d_ssm", 1024)

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model; multipliers of inputs are 1."""
        hybrid, root = config.hybrid, config.kv_channels**-0.5
        # Reading multiplies by the root again, which rounding may change.
        exact = config.score_scale / root
        near = (round(exact, 12), exact, math.nextafter(exact, 0.0), math.nextafter(exact, math.inf))
        keys = next((value for value in near if root * value == config.score_scale), exact)
        settings = super().write_settings(config) | {
            **dict.fromkeys(_BIASES, False),
            "attention_out_multiplier": hybrid.parallel_attention_multiplier,
            "embedding_multiplier": config.embedding_multiplier,
            "key_multiplier": keys,
            "lm_head_multiplier": config.logit_scale,
            "mamba_d_ssm": hybrid.inner_size(MAMBA, config.hidden_size),
            "mamba_norm_before_gate": hybrid.mamba_norm == "before-gate",
            "mamba_rms_norm": hybrid.mamba_norm != "none",
            "mlp_multipliers": [config.mlp_gate_multiplier, config.mlp_output_multiplier],
            "ssm_multipliers": list(hybrid.mamba_multipliers),
            "ssm_out_multiplier": hybrid.parallel_mamba_multiplier,
        }
        del settings["mamba_expand"]
        return settings
