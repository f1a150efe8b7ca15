"""Kimi Delta Attention (KDA): a gated delta-net in which every channel of the keys has its own decay.

Kimi Team 2025, https://arxiv.org/abs/2510.26692.
"""

from __future__ import annotations

import torch

from megatron.core.tensor_parallel import ColumnShardedLinear
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.kimi_delta_attention_kind import KIMI_DELTA_ATTENTION
from megatron.core.transformer.multi_latent_attention import ReplicatedLinear


class KimiDeltaAttention(GatedDeltaNet):
    """Gated delta-net with decays per channel, and with low-rank projections to the decays and to the gate.

    The low rank is the dimension of a value head. The decays belong to key heads, like the keys. The rows of the input
    projection are queries, keys, values and beta.
    """

    def _add_decays(self, config: DecoderConfig, copies: int) -> None:
        self._add_decay(config.hybrid.linear_num_key_heads, self.key_dim, copies)

    def _add_all_projections(self, config: DecoderConfig) -> None:
        hybrid = config.hybrid
        keys, values = hybrid.linear_key_size, hybrid.linear_value_size
        self.rows = hybrid.projection_rows(KIMI_DELTA_ATTENTION, config.hidden_size)
        self._add_projections(config, values)

        def down() -> ReplicatedLinear:
            return ReplicatedLinear(config, config.hidden_size, self.value_dim, self.tp, self.device)

        def up(width: int) -> ColumnShardedLinear:
            return ColumnShardedLinear(
                self.value_dim,
                width,
                self.tp,
                config=config,
                init_std=config.init_method_std,
                bias=False,
                device=self.device,
            )

        self.f_a_proj, self.f_b_proj = down(), up(keys)
        self.g_a_proj, self.g_b_proj = down(), up(values)

    def project(self, x: torch.Tensor) -> torch.Tensor:
        qkv, beta = self.in_proj(x).tensor_split((-self.rows[-1] // self.tp.size,), dim=-1)
        return torch.cat((qkv, self.g_b_proj(self.g_a_proj(x)), beta, self.f_b_proj(self.f_a_proj(x))), dim=-1)

    def opening(self, gate: torch.Tensor) -> torch.Tensor:
        return gate.sigmoid()

    def log_decay(self, x: torch.Tensor, padding: torch.Tensor | None) -> torch.Tensor:
        steps = torch.unflatten(self.steps(x, padding), -1, (-1, self.key_dim))
        return (self.decay_rates()[:, None] * steps).repeat_interleave(self.values_per_key, dim=2)
