"""Self-attention with grouped queries, its heads sharded over the tensor-parallel group."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from megatron.core.context_parallel.attention import with_context_parallel
from megatron.core.context_parallel.key_value_heads import key_value_heads_of_rank
from megatron.core.kernels.attention_block import AttentionBlocks
from megatron.core.kernels.attention_choice import PLAIN_BACKENDS, AttentionCall, select_attention_core
from megatron.core.kernels.attention_pattern import AttentionPattern
from megatron.core.kernels.dropout_keys import AttentionDropout, DropoutKeys
from megatron.core.kernels.triton_choice import runs_on_triton
from megatron.core.layer_output import LayerOutput
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group, single_rank_group
from megatron.core.tensor_parallel.comm_overlap_config import linear_overlap
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.across_heads_norm import AcrossHeadsNorm
from megatron.core.transformer.attention_kinds.softmax_offset import SoftmaxOffset
from megatron.core.transformer.dropout import require_keys
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.query_key_value import make_query_key_value
from megatron.core.transformer.rotary_pos_embedding import (
    RotaryAngles,
    apply_rotary_to_both,
    split_and_rotate,
    split_projection,
)
from megatron.core.transformer.transformer_config import TransformerConfig


def describe_attention(
    config: TransformerConfig, device: torch.device | str, seq_length: int, *, has_documents: bool
) -> str:
    """Return one line that names the kernels by which the layers compute attention in training."""
    device = torch.device(device)
    softcap, size = config.attn_logit_softcapping, config.context_parallel_size
    kernels = select_attention_core(config.attention_backend, device, softcap, config.transformer_impl)
    blocks = AttentionBlocks(config.attention_backend in PLAIN_BACKENDS, softcap)
    dtype, head_dim = dtype_from_name(config.params_dtype), config.head_width
    pattern = AttentionPattern(document_ids=torch.empty(0) if has_documents else None)
    names: Counter[str] = Counter()
    for number, window in enumerate(config.layer_windows):
        exchange = config.cp_exchange(number) if size > 1 else ""
        has_window = window is not None and window < seq_length
        if exchange in ("p2p", "a2a+p2p"):
            has_kernel = blocks.has_kernel(
                *(device.type, dtype, head_dim),
                has_mask=has_documents or has_window,
                has_dropout=config.attention_dropout > 0.0,
            )
            names["torch's flash kernel, block by block" if has_kernel else "step by step, block by block"] += 1
            continue
        call = AttentionCall(
            *(dtype, head_dim, seq_length // (2 * size if exchange == "all_gather" else 1), seq_length),
            replace(pattern, window=window if has_window else None),
            has_groups=config.num_query_groups != config.num_attention_heads,
            has_dropout=config.attention_dropout > 0.0,
            has_softcap=softcap is not None,
            has_sinks=config.has_sinks,
        )
        names[kernels.choose(call).name] += 1
    if len(names) == 1:
        return f"attention kernel: {names.popitem()[0]}"
    return "attention kernels: " + "; ".join(f"{name} ({count} layers)" for name, count in names.items())


class SelfAttention(nn.Module):
    """Attend from every position to those that the pattern lets it look at.

    Under context parallelism ``s`` is this rank's part of the sequence, and only the core sees the others.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        tp: Group,
        device: torch.device | str,
        cp: Group | None = None,
    ) -> None:
        super().__init__()
        self.layer_number = layer_number
        self.head_dim = config.head_width
        self.num_heads = config.num_attention_heads // tp.size
        self.heads = range(tp.rank * self.num_heads, (tp.rank + 1) * self.num_heads)
        self.num_groups = key_value_heads_of_rank(config.num_query_groups, tp.size)
        self.window = config.layer_windows[config.kind_of(layer_number)]
        self.has_rotary = not config.layers_without_rotary[config.kind_of(layer_number)]
        self.score_factor = self._factor_of_scores(config)
        self.dropout = config.attention_dropout
        self.observe_logits: Callable[[torch.Tensor, torch.Tensor, AttentionPattern], None] | None = None
        self.recompute_core = "core_attn" in config.recomputed_modules
        self.cp = single_rank_group(("cp",)) if cp is None else cp
        self.core = with_context_parallel(
            select_attention_core(
                config.attention_backend, device, config.attn_logit_softcapping, config.transformer_impl
            ),
            config.cp_exchange(config.kind_of(layer_number)),
            self.cp,
            plain_blocks=config.attention_backend in PLAIN_BACKENDS,
            softcap=config.attn_logit_softcapping,
        )
        # In the order in which Megatron's optimizer files list them: linear_proj before linear_qkv.
        self.core_attention = SoftmaxOffset(config, tp, device)
        self.linear_proj = RowParallelLinear(
            config.context_size,
            config.hidden_size,
            tp,
            has_bias=config.add_bias_linear,
            sequence_parallel=config.sequence_parallel,
            init_std=config.output_init_method_std,
            dtype=dtype_from_name(config.params_dtype),
            device=device,
            library=config.cpu_matmul,
            overlap=linear_overlap(config, "proj"),
        )
        self._add_projections(config, tp, device)

    def _add_projections(self, config: TransformerConfig, tp: Group, device: torch.device | str) -> None:
        """Make what queries, keys and values come from."""
        self.linear_qkv = make_query_key_value(config, tp, device)
        self.q_layernorm: nn.Module | None
        self.q_layernorm = self._norm(config, config.num_attention_heads, tp, device) if config.qk_layernorm else None
        self.k_layernorm = self._norm(config, config.num_query_groups, tp, device) if config.qk_layernorm else None

    def _factor_of_scores(self, config: TransformerConfig) -> float | None:
        """Return what scores are multiplied by, which the cores divide by the root of the head's width."""
        if config.mup_base_head_dim is not None:
            return float((config.kv_channels / config.mup_base_head_dim) ** (0.5 - config.mup_attn_scale_power))
        if config.score_scalar == config.kv_channels:
            return None
        return float((config.kv_channels / config.score_scalar) ** 0.5)

    @staticmethod
    def _norm(config: TransformerConfig, num_heads: int, tp: Group, device: torch.device | str) -> nn.Module:
        if config.qk_layernorm_across_heads:
            return AcrossHeadsNorm(config, num_heads, tp, device)
        return Norm(
            config.normalization,
            config.kv_channels,
            config.norm_epsilon,
            tp,
            partial_gradient=True,
            centred_weight=config.apply_layernorm_1p,
            dtype=dtype_from_name(config.params_dtype),
            device=device,
            transformer_impl=config.transformer_impl,
        )

    def forward(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
        dropout: DropoutKeys | None = None,
    ) -> LayerOutput:
        """Return the attention output.

        Raises:
            ConfigurationError: weights are dropped in training, and there are no keys.
        """
        assert self.cp.size == 1 or (cache is None and pattern.mask is None), "a cache or a mask is of whole sequences"
        if not self.has_rotary:
            angles = None
        elif angles is not None and self.window is not None and angles.local is not None:
            angles = angles.local
        return LayerOutput(self.linear_proj(self._context(x, pattern, angles, cache, dropout)))

    def _context(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None,
        dropout: DropoutKeys | None,
    ) -> torch.Tensor:
        """Return the weighted values of this rank's heads. Shapes: ``-> [s, b, n/tp * d]``."""
        return self._weighted(*self._query_key_value(x, angles, cache), pattern, dropout)

    def _weighted(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: AttentionPattern,
        dropout: DropoutKeys | None,
    ) -> torch.Tensor:
        if self.score_factor is not None:
            query = query * self.score_factor
        if self.window is not None and self.window < key.shape[0] * self.cp.size:
            pattern = pattern.within(self.window)
        if self.observe_logits is not None and self.training:
            self.observe_logits(query, key, pattern)
        of_weights = None
        if self.training and self.dropout > 0.0:
            of_weights = require_keys(dropout).of_attention(self.layer_number, self.dropout, self.heads)
        sinks = self.core_attention()
        if self.recompute_core and self.training:
            return recompute(self._attend, query, key, value, pattern, of_weights, sinks)
        return self._attend(query, key, value, pattern, of_weights, sinks)

    def _query_key_value(
        self, x: torch.Tensor, angles: RotaryAngles | None, cache: KeyValueCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries of some positions, and the keys and values of these and of those in the cache."""
        query, key, value = self._projected(x, angles)
        if cache is not None:
            key, value = cache.update(self.layer_number, key, value)
        return query, key, value

    def _projected(
        self, x: torch.Tensor, angles: RotaryAngles | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        is_rotated_first = angles is not None and (self.q_layernorm is None or self.k_layernorm is None)
        bias = None if is_rotated_first else self._bias_of_split(x)
        mixed = self.linear_qkv(x) if bias is None else self.linear_qkv(x, gives_bias_gradient=False)
        mixed = mixed.view(*mixed.shape[:2], self.num_groups, self.num_heads // self.num_groups + 2, self.head_dim)
        if angles is not None and is_rotated_first:
            return split_and_rotate(mixed, angles)
        query, key, value = split_projection(mixed, bias)
        if self.q_layernorm is None or self.k_layernorm is None:
            return query, key, value
        query, key = self.q_layernorm(query), self.k_layernorm(key)
        if angles is not None:
            query, key = apply_rotary_to_both(query, key, angles)
        return query, key, value

    def _bias_of_split(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the projection's bias where Triton sums its gradient, while it joins those of the parts."""
        bias = self.linear_qkv.bias if isinstance(self.linear_qkv, ColumnParallelLinear) else None
        return bias if bias is not None and bias.requires_grad and runs_on_triton(x, bias) else None

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: AttentionPattern,
        dropout: AttentionDropout | None,
        sinks: torch.Tensor | None,
    ) -> torch.Tensor:
        """Shapes: ``query: [s, b, n/tp, d] -> [s, b, n/tp * d]``."""
        context = self.core(query, key, value, pattern, dropout, sinks=sinks)
        return context.reshape(*context.shape[:2], -1)
