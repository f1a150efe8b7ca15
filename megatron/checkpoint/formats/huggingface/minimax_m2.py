"""MiniMax-M2: Mixtral's layers with sigmoid routing by an expert bias, QK norms across heads, and partial RoPE."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import ExpertNames, RotaryDecoderFamily, expert_fields
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.rope import read_partial_rope
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig

_BIAS = "e_score_correction_bias"


class MiniMaxM2Family(RotaryDecoderFamily):
    """MiniMax-M2 (``MiniMaxM2ForCausalLM``)."""

    model_type = "minimax_m2"
    architecture = "MiniMaxM2ForCausalLM"
    default_positions = 196608
    default_groups = 8
    default_head_dim = 128
    default_rotary_base = 5000000.0
    expert_names = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts", "w1", "w3", "w2")
    other_names = ((f"block_sparse_moe.{_BIAS}", f"mlp.{_BIAS}"),)

    def read_rope(self, settings: Settings, positions: int) -> dict[str, Any]:
        """Return the RoPE fields; published files have ``rotary_dim`` instead of the fraction of rotated channels."""
        share, base = 1.0, self.default_rotary_base
        if settings.values.get("rotary_dim") is not None:
            share = settings.integer("rotary_dim") / settings.integer("head_dim", self.default_head_dim)
        return read_partial_rope(settings, positions, "rope_theta", "partial_rotary_factor", share, base)

    def own_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of QK norms and MoE; reject noise and a single expert per token."""
        settings.require_zero("router_jitter_noise", "noise in the router's input is not supported")
        experts = settings.integer("num_local_experts", settings.integer("num_experts", 256))
        fields = expert_fields(settings, experts, settings.integer("intermediate_size"), 8)
        if fields["moe_router_topk"] == 1:
            settings.refuse("num_experts_per_tok is 1; use 2 or more: a single expert has the weight 1 in transformers")
        return {
            **fields,
            "qk_layernorm": True,
            "qk_layernorm_across_heads": True,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        return super().write_settings(config) | {
            "intermediate_size": config.moe.moe_ffn_hidden_size,
            "num_experts_per_tok": config.moe.moe_router_topk,
            "num_local_experts": config.moe.num_experts,
            "partial_rotary_factor": config.rotary_percent,
            "rotary_dim": config.rotary_dim,
        }

    def expert_layer_links(self, config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
        """Yield the links of router, experts and the router's expert bias."""
        yield from super().expert_layer_links(config, ours, theirs)
        bias = f"{theirs}block_sparse_moe.{_BIAS}"
        yield whole(f"{ours}mlp.router.expert_bias", bias, (config.moe.num_experts or 0,))
