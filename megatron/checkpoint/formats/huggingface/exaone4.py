"""EXAONE 4 and EXAONE-MoE: QK norms per head, and no RoPE in layers without a sliding window.

EXAONE 4 has norms after attention and MLP. EXAONE-MoE has norms before them, and DeepSeek-V3's experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    RotaryDecoderFamily,
    no_rope_pattern,
    read_layer_types,
    window_fields,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.deepseek_v3 import (
    SharedExpertFamily,
    count_of,
    typed_layers,
    written_layers,
)
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class Exaone4Family(RotaryDecoderFamily):
    """EXAONE 4 (``Exaone4ForCausalLM``)."""

    model_type = "exaone4"
    architecture = "Exaone4ForCausalLM"
    default_positions = 2048
    default_groups = 32
    default_epsilon = 1e-5
    norm_names = (
        ("post_self_attn_layernorm", "post_attention_layernorm"),
        ("post_mlp_layernorm", "post_feedforward_layernorm"),
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the norms, the sliding windows and the layers without RoPE."""
        return {"norm_placement": "post", "qk_layernorm": True, **_window_fields(settings)}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | written_layer_types(config) | {"pad_token_id": None}


class ExaoneMoeFamily(SharedExpertFamily):
    """EXAONE-MoE (``ExaoneMoeForCausalLM``)."""

    model_type = "exaone_moe"
    architecture = "ExaoneMoeForCausalLM"
    default_positions = 2048
    default_groups = 32
    default_epsilon = 1e-5
    experts_setting, shared_setting = "num_experts", "num_shared_experts"
    bias_name = "mlp.e_score_correction_bias"
    other_names = ((bias_name, SharedExpertFamily.bias_name),)
    has_mtp = False
    expert_defaults: Mapping[str, Any] = MappingProxyType(
        {
            "moe_intermediate_size": 1024,
            "num_experts": 64,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "routed_scaling_factor": 2.5,
        }
    )

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the norms, the sliding windows, the layers without RoPE, and MoE."""
        return {"qk_layernorm": True, **_window_fields(settings), **self.experts_of(settings)}

    def layers_with_experts(self, settings: Settings) -> str:
        return typed_layers(settings, count_of(settings, "first_k_dense_replace", 1))

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | written_layer_types(config) | written_layers(config)


def _window_fields(settings: Settings) -> dict[str, Any]:
    """Return the fields of the sliding windows and of the layers without RoPE."""
    layers = min(settings.integer("num_hidden_layers"), 100_000)
    has_windows = settings.values.get("sliding_window", 4096) is not None
    by_default = [False] * layers
    if has_windows and settings.values.get("layer_types") is None:
        period = settings.integer("sliding_window_pattern", 4)
        by_default = [(layer + 1) % period != 0 for layer in range(layers)]
    has_window = read_layer_types(settings, by_default)
    if has_windows and not any(has_window) and not settings.problems:
        settings.refuse("sliding_window is set, but no layer uses it, which leaves no layer with RoPE; set it to null")
    # Without windows, every layer has RoPE.
    pattern = no_rope_pattern(has_window) if any(has_window) else None
    return {"no_rope_freq": pattern, **window_fields(settings, has_window, 4096)}
