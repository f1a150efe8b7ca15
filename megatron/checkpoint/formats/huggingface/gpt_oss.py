"""GPT-OSS: attention sinks, sliding windows in every second layer, biases everywhere, and MoE with a clamped gate."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import (
    RotaryDecoderFamily,
    expert_fields,
    read_layer_types,
    window_fields,
    written_layer_types,
)
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.rope import read_rope, with_default_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box
from megatron.core.transformer import LayerParts

_GATE_STEEPNESS, _WINDOW = 1.702, 128
_UNSAID_ROPE = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
"""RoPE settings that apply if config.json has none."""


class GptOssFamily(RotaryDecoderFamily):
    """GPT-OSS (``GptOssForCausalLM``), whose experts are one tensor with interleaved gate and up channels."""

    model_type = "gpt_oss"
    architecture = "GptOssForCausalLM"
    has_qkv_bias = True
    default_positions = 131072
    default_groups = 8
    default_head_dim = 64
    default_epsilon = 1e-5
    default_rotary_base = 150000.0
    expert_names = None

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields."""
        return read_rope(with_default_rope(settings, _UNSAID_ROPE), positions, self.default_rotary_base)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of attention sinks, sliding windows and MoE; reject unsupported settings."""
        settings.require("attention_bias", True, True, "every linear layer has a bias")
        settings.require("swiglu_alpha", _GATE_STEEPNESS, _GATE_STEEPNESS, "the gate is x * sigmoid(1.702 x)")
        limit = settings.positive_or_none("swiglu_limit", 7.0)
        if limit is None:
            settings.refuse("swiglu_limit is null; a number greater than 0 is expected")
        layers = min(settings.integer("num_hidden_layers"), 100_000)
        has_window = read_layer_types(settings, [layer % 2 == 0 for layer in range(layers)])
        experts = settings.integer("num_local_experts", settings.integer("num_experts", 128))
        # The published folders state no dtype; their tensors that are not quantized to 4 bits are bfloat16.
        is_half = settings.dtype() is None and settings.values.get("quantization_config") is not None
        return {
            **({"bf16": True, "params_dtype": "bfloat16"} if is_half else {}),
            "softmax_type": "learnable",
            "add_bias_linear": True,
            "add_qkv_bias": False,
            "swiglu": False,
            "quick_geglu": True,
            "glu_linear_offset": 1.0,
            "activation_func_clamp_value": limit,
            **window_fields(settings, has_window, _WINDOW),
            **expert_fields(settings, experts, settings.integer("intermediate_size"), 4),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        settings = super().write_settings(config) | written_layer_types(config)
        # transformers needs a window size even if no layer has a window, and an explicit default for RoPE scaling.
        settings["sliding_window"] = settings["sliding_window"] or _WINDOW
        settings["rope_scaling"] = settings["rope_scaling"] or {"rope_type": "default"}
        return settings | {
            "attention_bias": True,
            "intermediate_size": config.moe.moe_ffn_hidden_size,
            "num_experts_per_tok": config.moe.moe_router_topk,
            "num_local_experts": config.moe.num_experts,
            "pad_token_id": None,
            "swiglu_limit": config.activation_func_clamp_value,
        }

    def layer_links(self, config: GPTConfig, ours: str, theirs: str, parts: LayerParts) -> Iterator[TensorLink]:
        """Yield the links of a layer; ``ours`` and ``theirs`` are the prefixes of its tensor names."""
        width, heads = config.hidden_size, config.num_attention_heads
        ours_of_attention, theirs_of_attention = f"{ours}self_attention.", f"{theirs}self_attn."
        yield whole(f"{ours_of_attention}core_attention.softmax_offset", f"{theirs_of_attention}sinks", (heads,))
        yield from self.attention_links(config, ours, theirs)
        for kind, shape in (("weight", (width, config.context_size)), ("bias", (width,))):
            yield whole(f"{ours_of_attention}linear_proj.{kind}", f"{theirs_of_attention}o_proj.{kind}", shape)
        yield from self.expert_layer_links(config, ours, theirs)
        for name, their_name in self.norm_names:
            yield whole(f"{ours}{name}.weight", f"{theirs}{their_name}.weight", (width,))

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of a layer's router and experts."""
        count, width, ffn = config.moe.num_experts or 0, config.hidden_size, config.moe.moe_ffn_hidden_size
        ours, theirs = f"{ours}mlp.", f"{theirs}mlp."
        yield whole(f"{ours}router.weight", f"{theirs}router.weight", (count, width))
        yield whole(f"{ours}router.bias", f"{theirs}router.bias", (count,))
        fc1, gated = f"{ours}experts.linear_fc1.", f"{theirs}experts.gate_up_proj"
        # Their gate and up channels are interleaved; ours are concatenated.
        for part in (0, 1):
            native = Box((0, part * ffn, 0), (count, ffn, width))
            foreign = Box((0, 0, part), (count, width, 2 * ffn - 1))
            yield TensorLink(f"{fc1}weight", native, gated, foreign, is_transposed=True, foreign_step=2)
        for part in (0, 1):
            native, foreign = Box((0, part * ffn), (count, ffn)), Box((0, part), (count, 2 * ffn - 1))
            yield TensorLink(f"{fc1}bias", native, f"{gated}_bias", foreign, foreign_step=2)
        fc2, down = f"{ours}experts.linear_fc2.", f"{theirs}experts.down_proj"
        native, foreign = Box((0, 0, 0), (count, width, ffn)), Box((0, 0, 0), (count, ffn, width))
        yield TensorLink(f"{fc2}weight", native, down, foreign, is_transposed=True)
        yield whole(f"{fc2}bias", f"{down}_bias", (count, width))
