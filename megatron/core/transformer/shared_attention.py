"""Self-attention in a model whose last layers use the keys and values of earlier layers (Brandon et al. 2024).

https://arxiv.org/abs/2405.12981.
"""

from __future__ import annotations

import torch

from megatron.core.layer_output import LayerOutput
from megatron.core.ops import AttentionPattern, DropoutKeys
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import ColumnShardedLinear
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles, apply_rotary
from megatron.core.transformer.shared_tensors import SharedTensors


class SourceAttention(SelfAttention):
    """Self-attention that adds its keys and values to the shared tensors, if later layers use them.

    Shapes: as for `SelfAttention`.
    """

    def forward(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
        dropout: DropoutKeys | None = None,
        shared: SharedTensors | None = None,
    ) -> LayerOutput:
        """Return the attention output; keys and values are read from and added to ``shared``."""
        assert shared is not None, "the layer passes the shared tensors"
        assert self.cp.size == 1 or (cache is None and pattern.mask is None), "a cache or a mask is of whole sequences"
        angles = self.own_angles(angles)
        heads = self._shared_heads(x, angles, cache, shared)
        return LayerOutput(self.linear_proj(self._weighted(*heads, pattern, dropout, angles)))

    def _shared_heads(
        self, x: torch.Tensor, angles: RotaryAngles | None, cache: KeyValueCache | None, shared: SharedTensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value = self.projected(x, angles)
        shared.new[self.layer_number] = key, value
        if cache is not None:
            key, value = cache.update(self.layer_number, key, value)
        shared.all[self.layer_number] = key, value
        return query, key, value


class BorrowingAttention(SourceAttention):
    """Self-attention that uses the keys and values of an earlier layer, and has a projection of queries only.

    Shapes: as for `SelfAttention`.
    """

    def _add_projections(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        source = config.key_value_sources[self.layer_number]
        assert source is not None, "the layer has no keys and values of its own"
        self.source, self.rotate_query = source, apply_rotary
        self.linear_q = ColumnShardedLinear(
            config.hidden_size,
            config.query_projection_size,
            tp,
            config=config,
            init_std=config.init_method_std,
            bias=config.has_qkv_bias,
            device=device,
            tp_comm_buffer_name="qkv",
        )
        self.q_layernorm = self._norm(config, config.num_attention_heads, tp, device) if config.qk_layernorm else None

    def _shared_heads(
        self, x: torch.Tensor, angles: RotaryAngles | None, cache: KeyValueCache | None, shared: SharedTensors
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.split_query(self.linear_q(x), angles), *shared.all[self.source]

    def split_query(self, query: torch.Tensor, angles: RotaryAngles | None) -> torch.Tensor:
        """Split the projection's output into heads, and normalize and rotate them as configured.

        Shapes: ``[s, b, n/tp * d] -> [s, b, n/tp, d]``.
        """
        if self.clip is not None:
            query = query.clamp(-self.clip, self.clip)
        query = query.view(*query.shape[:2], -1, self.head_dim)
        if self.q_layernorm is not None and not self.rotates_first:
            query = self.q_layernorm(query)
        if angles is not None:
            query = self.rotate_query(query, angles)
        if self.q_layernorm is not None and self.rotates_first:
            query = self.q_layernorm(query)
        return query
