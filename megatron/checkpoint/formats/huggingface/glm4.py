"""GLM-4: interleaved RoPE on half of each head, norms before and after each sublayer, fused gate and up projections."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig


class Glm4Family(RotaryDecoderFamily):
    """GLM-4 of the releases since 0414 (``Glm4ForCausalLM``)."""

    model_type = "glm4"
    architecture = "Glm4ForCausalLM"
    default_positions = 131072
    default_groups = 2
    default_head_dim = 128
    default_epsilon = 1.5625e-7
    norm_names = (
        ("input_layernorm", "input_layernorm"),
        ("pre_mlp_layernorm", "post_attention_layernorm"),
        ("post_self_attn_layernorm", "post_self_attn_layernorm"),
        ("post_mlp_layernorm", "post_mlp_layernorm"),
    )

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields, with the fraction of rotated channels."""
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", 0.5)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of norms, QKV biases and interleaved RoPE."""
        return {
            "norm_placement": "sandwich",
            "add_qkv_bias": settings.switch("attention_bias", True),
            "rotary_interleaved": True,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "attention_bias": config.has_qkv_bias,
            "pad_token_id": None,
            "partial_rotary_factor": config.rotary_percent,
        }

    def fc1_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the link of gate and up, which are one tensor."""
        gated = (2 * config.ffn_hidden_size, config.hidden_size)
        yield whole(f"{ours}mlp.linear_fc1.weight", f"{theirs}mlp.gate_up_proj.weight", gated)
