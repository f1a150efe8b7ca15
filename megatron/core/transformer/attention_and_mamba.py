"""Attention and Mamba-2 in parallel, as in Falcon-H1 (https://arxiv.org/abs/2507.22448)."""

from __future__ import annotations

import torch
from torch import nn

from megatron.core.layer_output import LayerOutput
from megatron.core.ops import AttentionPattern, DropoutKeys
from megatron.core.transformer.hybrid_config import HybridConfig
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.mamba_mixer import MambaMixer
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles


class AttentionAndMamba(nn.Module):
    """Sum the outputs of an attention and a Mamba-2 layer on the same input, each with a multiplier.

    Called like `SelfAttention`. A cache holds keys, values and states of the layer.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(self, hybrid: HybridConfig, attention: nn.Module, mamba: MambaMixer) -> None:
        super().__init__()
        self.self_attention, self.mamba = attention, mamba
        self.multipliers = hybrid.parallel_attention_multiplier, hybrid.parallel_mamba_multiplier

    def forward(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
        dropout: DropoutKeys | None = None,
    ) -> LayerOutput:
        attended, losses = self.self_attention(x, pattern, angles, cache, dropout)
        mixed, _ = self.mamba(x, pattern, angles, cache, dropout)
        of_attention, of_mamba = self.multipliers
        return LayerOutput(attended * of_attention + mixed * of_mamba, losses)
