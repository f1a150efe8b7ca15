"""Declaration of Kimi Delta Attention (KDA) layers. Importing this module does not import torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import count

from megatron.core.transformer.gated_delta_net_kind import GatedDeltaNetKind
from megatron.core.transformer.linear_attention_kind import LinearAttentionConfig

KIMI_DELTA_ATTENTION = "kimi_delta_attention"


class KimiDeltaAttentionKind(GatedDeltaNetKind):
    """Kimi Delta Attention (KDA): Kimi Team 2025, https://arxiv.org/abs/2510.26692.

    Low-rank pairs of linear layers compute the gate and the decays. Their rank is the dimension of a value head.
    """

    name, symbol, title = KIMI_DELTA_ATTENTION, "K", "KDA"
    layer = "megatron.core.transformer.kimi_delta_attention:KimiDeltaAttention"
    num_linear_layers = 6

    def projection_rows(self, hybrid: LinearAttentionConfig, hidden_size: int) -> tuple[int, ...]:
        """Return the rows of queries, keys, values and beta."""
        keys, values = hybrid.linear_key_size, hybrid.linear_value_size
        return keys, keys, values, hybrid.linear_num_value_heads

    def gemm_multiply_adds(self, hybrid: LinearAttentionConfig, hidden_size: int) -> int:
        low_rank = 2 * hidden_size + hybrid.linear_value_size + hybrid.linear_key_size
        return super().gemm_multiply_adds(hybrid, hidden_size) + hybrid.linear_value_head_dim * low_rank

    def check_quantized_widths(
        self, hybrid: LinearAttentionConfig, tensor: int, multiple: int, needed: str
    ) -> Iterator[str]:
        rank, keys = hybrid.linear_value_head_dim, hybrid.linear_num_key_heads
        if rank % multiple:
            yield (
                f"--linear-value-head-dim {rank} is the width of the low-rank projections of a KDA layer, {needed}; "
                f"use {-(-rank // multiple) * multiple}"
            )
        if keys % tensor == 0 and hybrid.linear_key_size // tensor % multiple:
            width = hybrid.linear_key_head_dim
            wider = next(each for each in count(width) if keys // tensor * each % multiple == 0)
            yield (
                f"--linear-key-head-dim {width} makes {hybrid.linear_key_size // tensor} key channels of a KDA layer "
                f"on each tensor-parallel rank, {needed}; use {wider}"
            )

    def input_widths(
        self, hybrid: LinearAttentionConfig, hidden_size: int, tensor: int
    ) -> Mapping[str, tuple[int, int]]:
        return {
            **super().input_widths(hybrid, hidden_size, tensor),
            "--linear-value-head-dim": (hybrid.linear_value_head_dim, 1),
        }
