"""Gemma 4 (text only): Gemma 3's windows and norms, with heads of another shape in layers without a window.

These layers use keys as values, and rotate the channels of highest frequency only. Values are normalized, scores are
not scaled, and a number per layer multiplies its output. Experts are next to the dense feed-forward, each with its own
norms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.attention_shapes import read_shapes, written_shapes
from megatron.checkpoint.formats.huggingface.decoder_layers import (
    ATTENTION_BIAS,
    RotaryDecoderFamily,
    expert_fields,
    norm_links,
    shared_expert_links,
    stacked_expert_links,
    window_fields,
    windows_before_full_layers,
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

EXPERT_NORMS = (
    ("post_shared_experts_layernorm", "post_feedforward_layernorm_1"),
    ("post_experts_layernorm", "post_feedforward_layernorm_2"),
    ("pre_experts_layernorm", "pre_feedforward_layernorm_2"),
)


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
    bias_settings = MappingProxyType({ATTENTION_BIAS: False})
    expert_names = None
    activation = ("hidden_activation", "gelu_pytorch_tanh", "geglu")
    norm_names = Gemma2Family.norm_names

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of windows, the shapes of attention, norms, experts, and what layers share."""
        if settings.values.get("use_bidirectional_attention") not in (None, "vision"):
            settings.require("use_bidirectional_attention", "vision", None, "attention of text is causal")
        has_window = windows_before_full_layers(settings, 6)
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
            **window_fields(settings, has_window, 512),
            **read_kinds_of_rope(settings, DEFAULT_ROPE, has_window, width, positions),
            **read_sharing(settings, has_window),
            **read_inputs(settings, 256, 262144),
            **shapes,
            **self.experts_of(settings),
        }

    def experts_of(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of the experts, next to which the dense feed-forward is the shared expert."""
        if not settings.switch("enable_moe_block", False):
            return {}
        renamed = settings.replaced({"num_experts_per_tok": settings.values.get("top_k_experts")})
        count, width = settings.integer("num_experts"), settings.integer("moe_intermediate_size")
        return expert_fields(renamed, count, width, None) | {
            "moe_shared_expert_intermediate_size": settings.integer("intermediate_size", self.default_ffn_size),
            "moe_expert_norms": True,
            "moe_router_norm": True,
            "moe_router_expert_scale": True,
        }

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        return {}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config) | written_layer_types(config)
        for name in ("rope_theta", "rope_scaling", *(() if any(config.layer_windows) else ("sliding_window",))):
            del settings[name]
        return settings | {
            "attention_k_eq_v": config.attention_k_eq_v,
            "final_logit_softcapping": config.final_logit_softcapping,
            "enable_moe_block": config.moe.num_experts is not None,
            **written_sharing(config),
            **written_shapes(config),
            **write_kinds_of_rope(config),
            **(self.written_experts(config) if config.moe.num_experts is not None else {}),
        }

    def written_experts(self, config: GPTConfig) -> dict[str, Any]:
        return {
            "intermediate_size": config.moe.moe_shared_expert_intermediate_size,
            "moe_intermediate_size": config.moe.moe_ffn_hidden_size,
            "num_experts": config.moe.num_experts,
            "top_k_experts": config.moe.moe_router_topk,
        }

    def links(self, config: GPTConfig) -> Iterable[TensorLink]:
        """Yield every link."""
        yield from super().links(config)
        yield from input_links(config, self.base_prefix)

    def is_buffer(self, name: str, config: GPTConfig) -> bool:
        """Return whether the tensor is not read: also keys and values of layers that use another layer's."""
        return super().is_buffer(name, config) or is_unused(config, name)

    def layer_links(self, config: GPTConfig, ours: str, theirs: str, parts: LayerParts) -> Iterator[TensorLink]:
        """Yield the links of a layer, of its factor, and of its branch for per-layer inputs."""
        yield whole(f"{ours}layer_scalar", f"{theirs}layer_scalar", (1,))
        yield from super().layer_links(config, ours, theirs, parts)
        yield from branch_links(config, ours, theirs)

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's dense feed-forward, router, experts and their norms."""
        yield from shared_expert_links(config, ours, theirs, "mlp")
        names = ("router.proj.weight", "experts.gate_up_proj", "experts.down_proj")
        yield from stacked_expert_links(config, ours, theirs, *names)
        count, width = config.moe.num_experts or 0, config.hidden_size
        yield whole(f"{ours}mlp.router.input_scale", f"{theirs}router.scale", (width,))
        yield whole(f"{ours}mlp.router.expert_scale", f"{theirs}router.per_expert_scale", (count,))
        for native, foreign in EXPERT_NORMS:
            yield from norm_links(config, f"{ours}mlp.{native}", f"{theirs}{foreign}")
