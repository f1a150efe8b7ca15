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
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles


class GatedAttention(SelfAttention):
    """Self-attention with a gate per channel of the heads' output."""

    has_gate = True

    def context(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None,
        dropout: DropoutKeys | None,
    ) -> torch.Tensor:
        query, gate, key, value = self.split_gated(self.linear_qkv(x), angles)
        if cache is not None:
            key, value = cache.update(self.layer_number, key, value)
        context = self._weighted(query, key, value, pattern, dropout, angles)
        opened = gate.flatten(2).to(arithmetic_dtype(gate.dtype)).sigmoid()
        return (context * opened).to(context.dtype)

    def split_gated(
        self, mixed: torch.Tensor, angles: RotaryAngles | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split the output of the fused projection, and normalize and rotate queries and keys as configured.

        Shapes: ``mixed: [s, b, (2n + 2 groups)/tp * d] -> query: [s, b, n/tp, d]``, gate with the heads of a group in
        one dim, ``key, value: [s, b, groups/tp, d]``.
        """
        heads = self.num_heads // self.num_groups
        mixed = mixed.view(*mixed.shape[:2], self.num_groups, 2 * heads + 2, self.head_dim)
        query, gate, key, value = mixed.split_with_sizes((heads, heads, 1, 1), dim=3)
        query, key, value = query.flatten(2, 3), key.squeeze(3), value.squeeze(3)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if angles is not None:
            query, key = self.rotate(query, key, angles)
        return query, gate, key, value
