"""Self-attention whose output is gated by the sigmoid of a projection of its input.

Qiu et al. 2025, https://arxiv.org/abs/2505.06708. As in Megatron-LM the rows of the fused projection are ``[q ... q,
gate ... gate, k, v]`` per key-value group.
"""

from __future__ import annotations

import torch

from megatron.core.ops import AttentionPattern, DropoutKeys
from megatron.core.precision import arithmetic_dtype
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles, apply_rotary_to_both


class GatedAttention(SelfAttention):
    """Self-attention with a gate per channel of the heads' output."""

    def context(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None,
        dropout: DropoutKeys | None,
    ) -> torch.Tensor:
        heads = self.num_heads // self.num_groups
        mixed: torch.Tensor = self.linear_qkv(x)
        mixed = mixed.view(*mixed.shape[:2], self.num_groups, 2 * heads + 2, self.head_dim)
        query, gate, key, value = mixed.split_with_sizes((heads, heads, 1, 1), dim=3)
        query, key, value = query.flatten(2, 3), key.squeeze(3), value.squeeze(3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if angles is not None:
            query, key = apply_rotary_to_both(query, key, angles)
        if cache is not None:
            key, value = cache.update(self.layer_number, key, value)
        context = self._weighted(query, key, value, pattern, dropout)
        opened = gate.flatten(2).to(arithmetic_dtype(gate.dtype)).sigmoid()
        return (context * opened).to(context.dtype)
