"""Gemma 4 (text only): Gemma 3's windows and norms, with heads of another shape in layers without a window.

These layers use keys as values, and rotate the channels of highest frequency only. Values are normalized, scores are
not scaled, and a number per layer multiplies its output.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from megatron.checkpoint.formats.huggingface.attention_shapes import read_shapes, written_shapes
from megatron.checkpoint.formats.huggingface.decoder_layers import (
    RotaryDecoderFamily,
    attention_bias_fields,
    read_layer_types,
    window_fields,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.gemma import Gemma2Family
from megatron.checkpoint.formats.huggingface.rope import read_kinds_of_rope, write_kinds_of_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.checkpoint.formats.huggingface.shared_layers import (
    branch_links,
    input_links,
    is_unused,
    read_inputs,
    read_sharing,
    written_sharing,
)
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import LayerParts

DEFAULT_ROPE = {
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


class Gemma4Family(RotaryDecoderFamily):
    """Language model of Gemma 4 (``Gemma4ForCausalLM``)."""

    model_type = "gemma4_text"
    architecture = "Gemma4ForCausalLM"
    multimodal_architecture = "Gemma4ForConditionalGeneration"
    other_names = (("model.", "model.language_model."),)
    other_parts = ("model.vision_tower.", "model.embed_vision.", "model.audio_tower.", "model.embed_audio.")
    default_positions = 131072
    default_groups = 4
    default_head_dim = 256
    default_ffn_size = 9216
    is_tied_by_default = True
    activation = ("hidden_activation", "gelu_pytorch_tanh", "geglu")
    norm_names = Gemma2Family.norm_names

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of windows, the shapes of attention, norms, and what layers share."""
        settings.require("enable_moe_block", False, False, "experts are not supported")
        if settings.values.get("use_bidirectional_attention") not in (None, "vision"):
            settings.require("use_bidirectional_attention", "vision", None, "attention of text is causal")
        has_window = windowed_layers(settings)
        shapes = read_shapes(settings, has_window, (self.default_head_dim, self.default_groups), 512)
        width, positions = shapes["global_kv_channels"], settings.integer("max_position_embeddings", 131072)
        return {
            "norm_placement": "sandwich",
            "scale_embeddings": True,
            "qk_layernorm": True,
            "v_layernorm": True,
            "layer_scalar": True,
            "softmax_scale": 1.0,
            "attention_k_eq_v": settings.switch("attention_k_eq_v", False),
            "final_logit_softcapping": settings.positive_or_none("final_logit_softcapping", None),
            **attention_bias_fields(settings),
            **window_fields(settings, has_window, 512),
            **read_kinds_of_rope(settings, DEFAULT_ROPE, has_window, width, positions),
            **read_sharing(settings, has_window),
            **read_inputs(settings, 256, 262144),
            **shapes,
        }

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        return {}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config) | written_layer_types(config)
        for name in ("rope_theta", "rope_scaling", *(() if any(config.layer_windows) else ("sliding_window",))):
            del settings[name]
        return settings | {
            "attention_bias": config.has_qkv_bias,
            "attention_k_eq_v": config.attention_k_eq_v,
            "final_logit_softcapping": config.final_logit_softcapping,
            **written_sharing(config),
            **written_shapes(config),
            **write_kinds_of_rope(config),
        }

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Yield every link."""
        yield from super().links(config)
        yield from input_links(config, self.base_prefix)

    def is_buffer(self, name: str, config: GPTConfig) -> bool:
        """Return whether the tensor is not read: also keys and values of layers that use those of others."""
        return super().is_buffer(name, config) or is_unused(config, name)

    def layer_links(self, config: GPTConfig, ours: str, theirs: str, parts: LayerParts) -> Iterator[TensorLink]:
        """Yield the links of a layer, of its factor, and of its branch for per-layer inputs."""
        yield whole(f"{ours}layer_scalar", f"{theirs}layer_scalar", (1,))
        yield from super().layer_links(config, ours, theirs, parts)
        yield from branch_links(config, ours, theirs)


def windowed_layers(settings: Settings) -> list[bool]:
    """Return whether each layer has a window; the last one has none, whatever the settings."""
    by_default = [(layer + 1) % 6 != 0 for layer in range(settings.integer("num_hidden_layers"))]
    return [*read_layer_types(settings, by_default)[:-1], False]
