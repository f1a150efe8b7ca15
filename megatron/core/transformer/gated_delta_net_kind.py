"""Declaration of gated delta-net layers. Importing this module does not import torch."""

from __future__ import annotations

from megatron.core.transformer.linear_attention_kind import LinearAttentionConfig, LinearAttentionKind

GATED_DELTA_NET = "gated_delta_net"


class GatedDeltaNetKind(LinearAttentionKind):
    """Gated delta-net: Yang et al. 2024, https://arxiv.org/abs/2412.06464."""

    name, symbol, title = GATED_DELTA_NET, "G", "gated delta-net"
    layer = "megatron.core.transformer.gated_delta_net:GatedDeltaNet"

    def projection_rows(self, hybrid: LinearAttentionConfig, hidden_size: int) -> tuple[int, ...]:
        """Return the rows of queries, keys, values, the gate of the output, beta and the decay input."""
        keys, values, heads = hybrid.linear_key_size, hybrid.linear_value_size, hybrid.linear_num_value_heads
        return keys, keys, values, values, heads, heads

    def recurrence_multiply_adds(self, hybrid: LinearAttentionConfig, hidden_size: int) -> float:
        """Return the multiply-adds per token of the gated delta rule and its convolution, as in Megatron-LM."""
        keys, values = hybrid.linear_key_size, hybrid.linear_value_size
        return hybrid.linear_conv_kernel_dim * (2 * keys + values) + 4 * values * hybrid.linear_key_head_dim
