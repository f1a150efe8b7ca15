"""Self-attention with grouped queries (GQA), sharded by head over the tensor-parallel group.

The rows of the fused query, key and value projection are ``[q ... q, k, v]`` per key-value group: Ainslie et al. 2023,
https://arxiv.org/abs/2305.13245. The softmax may have an attention sink per head, learned or 0.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import nn

from megatron.core.context_parallel import key_value_heads_of_rank, with_context_parallel
from megatron.core.layer_output import LayerOutput
from megatron.core.ops import (
    PLAIN_BACKENDS,
    AttentionBlocks,
    AttentionCall,
    AttentionInputs,
    AttentionPattern,
    DropoutKeys,
    FlashShape,
    Fp8Quantizers,
    activate_flash_implementation,
    active_flash_implementation,
    runs_on_triton,
    select_attention_core,
)
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group, single_rank_group
from megatron.core.sharding import Box, ParamSpec, Shard, attach_spec, even_shards, spec_of
from megatron.core.tensor_parallel import (
    ColumnShardedLinear,
    InputRegion,
    RowShardedLinear,
    linear_overlap,
    make_parameter,
    stacked_weights,
    tensor_parallel_linear,
)
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.dropout import require_keys
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.linear_biases import LinearBiases
from megatron.core.transformer.norm import AcrossHeadsNorm, Norm, PerHeadNorm
from megatron.core.transformer.rotary_pos_embedding import (
    RotaryAngles,
    apply_rotary_to_both,
    split_and_rotate,
    split_projection,
)

LogitObserver = Callable[["SelfAttention", torch.Tensor, torch.Tensor, AttentionPattern], None]
"""Function that receives an attention layer, and the queries, keys and pattern of its logits in training."""


class AttentionSinks(nn.Module):
    """Attention sinks of this rank's heads: logits whose exponentials are added to the softmax denominators.

    An off-by-one softmax has sinks of 0, which are not a parameter.

    Shapes: ``-> [n/tp]``, or None without sinks.
    """

    def __init__(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.softmax_offset: torch.Tensor | None = None
        heads, dtype = config.num_attention_heads, dtype_from_name(config.params_dtype)
        if config.softmax_type == "learnable":
            spec = ParamSpec(
                "softmax_offset", (heads,), even_shards((heads,), 0, tp.rank, tp.size), init_std=config.init_method_std
            )
            self.softmax_offset = make_parameter((heads // tp.size,), spec, dtype, device)
        self.is_off_by_one = config.softmax_type == "off-by-one"
        self.num_heads, self.dtype, self.device = heads // tp.size, dtype, device

    def forward(self) -> torch.Tensor | None:
        if self.is_off_by_one:
            return torch.zeros(self.num_heads, dtype=self.dtype, device=self.device)
        return self.softmax_offset


def make_query_key_value(config: DecoderConfig, tp: Group, device: torch.device | str) -> nn.Module:
    """Create the projection ``[s, b, h] -> [s, b, rows of this rank's groups]``.

    With at least as many groups as tensor-parallel ranks each rank holds whole groups. With fewer groups, several ranks
    share a group: each rank has its own query heads and a copy of the group's key and value.
    """
    if config.num_query_groups % tp.size == 0:
        linear = ColumnShardedLinear(
            config.hidden_size,
            _num_fused_rows(config),
            tp,
            config=config,
            init_std=config.init_method_std,
            bias=config.has_qkv_bias,
            device=device,
            tp_comm_buffer_name="qkv",
        )
        attach_spec(linear.weight, replace(spec_of(linear.weight), fused_rows=_rows_of_a_group(config)))
        return linear
    return SharedGroupQueryKeyValue(config, tp, device)


def _num_fused_rows(config: DecoderConfig) -> int:
    queries = config.query_projection_size + config.gate_projection_size
    return queries + config.kv_projection_size + config.value_projection_size


def _rows_of_a_group(config: DecoderConfig) -> tuple[int, ...]:
    query_rows = config.query_projection_size // config.num_query_groups
    key_rows = (config.kv_channels,) * (1 if config.attention_k_eq_v else 2)
    return (*(query_rows,) * (2 if config.attention_output_gate else 1), *key_rows)


class SharedGroupQueryKeyValue(nn.Module):
    """Query, key and value projection for fewer key-value groups than tensor-parallel ranks.

    The query rows, and those of an output gate, belong to this rank alone. The key and value rows are equal on the
    ranks that share the group, and their gradients are partial sums that must be added over those ranks.

    Shapes: ``[s, b, h] -> [s, b, (heads/tp + 2) * d]``, with a gate ``[s, b, (2 * heads/tp + 2) * d]``, with keys as
    values ``[s, b, (heads/tp + 1) * d]``; the input is ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        self.tp = tp
        self.product_library = config.cpu_gemm_backend
        self.overlap = linear_overlap(config, "qkv")
        self.quantizers: Fp8Quantizers | None = None
        self.region = InputRegion.SEQUENCE if config.sequence_parallel else InputRegion.REPLICATED
        dtype = dtype_from_name(config.params_dtype)
        width = config.hidden_size
        ranks_per_group = tp.size // config.num_query_groups
        group, member = divmod(tp.rank, ranks_per_group)
        total_rows = _num_fused_rows(config)
        rows_per_group = total_rows // config.num_query_groups
        query_rows = config.query_projection_size // tp.size
        kv_rows = (1 if config.attention_k_eq_v else 2) * config.kv_channels
        query_start = group * rows_per_group + member * query_rows
        kv_start = (group + 1) * rows_per_group - kv_rows
        query_starts = [query_start]
        if config.attention_output_gate:
            query_starts.append(query_start + ranks_per_group * query_rows)

        def parameter(name: str, starts: Sequence[int], rows: int, shared: bool) -> nn.Parameter:
            trailing = (width,) if name == "weight" else ()
            zeros = tuple(0 for _ in trailing)
            shards = [
                Shard(Box((start, *zeros), (rows, *trailing)), (number * rows, *zeros))
                for number, start in enumerate(starts)
            ]
            spec = ParamSpec(
                name,
                (total_rows, *trailing),
                tuple(shards),
                gradient_sum_axes=("tp",) if shared else (),
                replica_index=member if shared else 0,
                num_replicas=ranks_per_group if shared else 1,
                init_std=config.init_method_std if name == "weight" else 0.0,
                fused_rows=_rows_of_a_group(config),
            )
            return make_parameter((rows * len(starts), *trailing), spec, dtype, device)

        self.query_weight = parameter("weight", query_starts, query_rows, shared=False)
        self.key_value_weight = parameter("weight", [kv_start], kv_rows, shared=True)
        self.query_bias: nn.Parameter | None = None
        self.key_value_bias: nn.Parameter | None = None
        if config.has_qkv_bias:
            self.query_bias = parameter("bias", query_starts, query_rows, shared=False)
            self.key_value_bias = parameter("bias", [kv_start], kv_rows, shared=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's query heads, the gates of an output gate, and its group's key and value."""
        weight = stacked_weights(self.query_weight, self.key_value_weight)
        bias = None
        if self.query_bias is not None and self.key_value_bias is not None:
            bias = torch.cat((self.query_bias, self.key_value_bias))
        return tensor_parallel_linear(
            *(x, weight, bias, self.region, self.tp),
            library=self.product_library,
            overlap=self.overlap,
            quantizers=self.quantizers,
        )


def describe_attention(
    config: DecoderConfig, device: torch.device | str, seq_length: int, *, has_documents: bool
) -> str:
    """Return one line that names the attention kernels that the layers use in training."""
    device = torch.device(device)
    softcap, size = config.attn_logit_softcapping, config.context_parallel_size
    kernels = select_attention_core(config.attention_backend, device, softcap, config.transformer_impl)
    blocks = AttentionBlocks(config.attention_backend in PLAIN_BACKENDS, softcap)
    dtype = dtype_from_name(config.params_dtype)
    selects = config.has_sparse_attention and seq_length > (config.mla.dsa_indexer_topk or 0)
    pattern = AttentionPattern(
        document_ids=torch.empty(0) if has_documents else None, mask=torch.empty(0) if selects else None
    )
    names: Counter[str] = Counter()
    for number, window in enumerate(config.layer_windows):
        if not config.layer_parts[number].has_attention:
            continue
        own = config.of_layer(number)
        head_dim = own.head_width
        exchange = config.cp_exchange(number) if size > 1 else ""
        has_window = window is not None and window < seq_length
        if exchange in ("p2p", "a2a+p2p"):
            has_kernel = blocks.has_kernel(
                *(device.type, dtype, head_dim),
                has_mask=has_documents or has_window,
                has_dropout=config.attention_dropout > 0.0,
            )
            active = active_flash_implementation()
            flash = "torch's flash kernel" if active is None else active.kernel
            names[f"{flash if has_kernel else 'step by step'}, block by block"] += 1
            continue
        # Each chunk of an all-gather is a call, or with selected keys all of a rank's queries.
        num_calls = (size if selects else 2 * size) if exchange == "all_gather" else 1
        call = AttentionCall(
            *(dtype, head_dim, seq_length // num_calls, seq_length),
            replace(pattern, window=window if has_window else None),
            has_groups=own.num_query_groups != config.num_attention_heads,
            has_dropout=config.attention_dropout > 0.0,
            has_softcap=softcap is not None,
            has_sinks=config.has_sinks,
            value_dim=value_width_of_core(own),
        )
        names[kernels.choose(call).name] += 1
    if not names:
        return "attention kernel: none, because no layer has attention"
    if len(names) == 1:
        return f"attention kernel: {names.popitem()[0]}"
    return "attention kernels: " + "; ".join(f"{name} ({count} layers)" for name, count in names.items())


def value_width_of_core(config: DecoderConfig) -> int:
    """Return the width of values in core attention.

    MLA's values, narrower than its queries and keys, keep their width if FlashAttention 3 or 4 is active. Context
    parallelism exchanges keys and values in one tensor, so their widths are equal.
    """
    has_own_width = active_flash_implementation() is not None and config.context_parallel_size == 1
    return config.value_width if has_own_width else config.head_width


def _activate_flash(config: DecoderConfig, device: torch.device | str) -> None:
    """Select the implementation of all layers, which must support their widest heads."""
    widest = max(config.attention_shapes, key=lambda own: own.head_width)
    widths = (widest.head_width, widest.head_width if config.context_parallel_size > 1 else widest.value_width)
    shape = FlashShape(dtype_from_name(config.params_dtype), *widths, config.attention_dropout > 0.0)
    activate_flash_implementation(config.attention_backend, device, shape)


class SelfAttention(nn.Module):
    """Self-attention with an `AttentionPattern` that determines which positions each position attends to.

    Under context parallelism ``s`` is this rank's part of the sequence. Only the core attention exchanges data with
    other ranks. A subclass changes queries, keys and values in `projected`, and the heads' output in `context`.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    has_gate = False
    """Whether the fused projection has rows of an output gate after the rows of the queries."""

    def __init__(
        self,
        config: DecoderConfig,
        layer_number: int,
        tp: Group,
        device: torch.device | str,
        cp: Group | None = None,
    ) -> None:
        super().__init__()
        _activate_flash(config, device)
        config = config.of_layer(layer_number)
        self.layer_number = layer_number
        self.head_dim = config.value_width if config.alibi_slopes is not None else config.head_width
        self.num_heads = config.num_attention_heads // tp.size
        self.heads = range(tp.rank * self.num_heads, (tp.rank + 1) * self.num_heads)
        self.num_groups = key_value_heads_of_rank(config.num_query_groups, tp.size)
        self.window = config.layer_windows[config.kind_of(layer_number)]
        self.has_rotary = not config.layers_without_rotary[config.kind_of(layer_number)]
        self.score_factor = self._factor_of_scores(config)
        self.clip = config.clip_qkv
        self.shares_keys = config.attention_k_eq_v
        self.rotates_first = not config.qk_layernorm or config.qk_layernorm_after_rope
        self.dropout = config.attention_dropout
        self.logit_observers: list[LogitObserver] = []
        self.tp_size = tp.size
        self.recompute_core = "core_attn" in config.recomputed_modules
        self.cp = single_rank_group(("cp",)) if cp is None else cp
        slopes = config.alibi_slopes
        self.biases = None if slopes is None else LinearBiases([slopes[head] for head in self.heads], self.cp)
        self.core = with_context_parallel(
            select_attention_core(
                config.attention_backend, device, config.attn_logit_softcapping, config.transformer_impl
            ),
            config.cp_exchange(config.kind_of(layer_number)),
            self.cp,
            plain_blocks=config.attention_backend in PLAIN_BACKENDS,
            softcap=config.attn_logit_softcapping,
        )
        # Order of submodules in Megatron's optimizer files: linear_proj before linear_qkv.
        self.core_attention = AttentionSinks(config, tp, device)
        self.linear_proj = RowShardedLinear(
            config.context_size,
            config.hidden_size,
            tp,
            config=config,
            init_std=config.output_init_method_std,
            bias=config.has_proj_bias,
            device=device,
            tp_comm_buffer_name="proj",
        )
        self.split_and_rotate, self.rotate = split_and_rotate, apply_rotary_to_both
        self._add_projections(config, tp, device)

    def _add_projections(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        """Create the projections of queries, keys and values."""
        self.linear_qkv = make_query_key_value(config, tp, device)
        self.q_layernorm: nn.Module | None
        self.q_layernorm = self._norm(config, config.num_attention_heads, tp, device) if config.qk_layernorm else None
        self.k_layernorm = self._norm(config, config.num_query_groups, tp, device) if config.qk_layernorm else None
        self.v_layernorm = self._head_norm(config, tp, device, ()) if config.v_layernorm else None

    def _factor_of_scores(self, config: DecoderConfig) -> float | None:
        """Return the factor of the attention scores, relative to division by the square root of the head width."""
        if config.mup.mup_base_head_dim is not None:
            return float((config.kv_channels / config.mup.mup_base_head_dim) ** (0.5 - config.mup.mup_attn_scale_power))
        if config.softmax_scale is not None:
            factor = config.softmax_scale * config.kv_channels**0.5
            return None if factor == 1.0 else float(factor)
        if config.score_scalar == config.kv_channels:
            return None
        return float((config.kv_channels / config.score_scalar) ** 0.5)

    @staticmethod
    def _norm(config: DecoderConfig, num_heads: int, tp: Group, device: torch.device | str) -> nn.Module:
        if config.qk_layernorm_across_heads:
            return AcrossHeadsNorm(config, num_heads, tp, device)
        if config.qk_layernorm_per_head:
            return PerHeadNorm(config, num_heads, tp, device)
        return SelfAttention._head_norm(config, tp, device, config.norm_parameter_names)

    @staticmethod
    def _head_norm(
        config: DecoderConfig, tp: Group, device: torch.device | str, parameters: Sequence[str]
    ) -> nn.Module:
        return Norm(
            config.normalization,
            config.kv_channels,
            config.norm_epsilon,
            tp,
            partial_gradient=True,
            centered_weight=config.apply_layernorm_1p,
            dtype=dtype_from_name(config.params_dtype),
            device=device,
            transformer_impl=config.transformer_impl,
            parameters=parameters,
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
            ConfigurationError: attention dropout is active in training, and ``dropout`` is None.
        """
        assert self.cp.size == 1 or (cache is None and pattern.mask is None), "a cache or a mask is of whole sequences"
        angles = self.own_angles(angles)
        return LayerOutput(self.linear_proj(self.context(x, pattern, angles, cache, dropout)))

    def own_angles(self, angles: RotaryAngles | None) -> RotaryAngles | None:
        """Return this layer's angles, which depend on whether it has a window, or None."""
        if not self.has_rotary or angles is None:
            return None
        return angles.local if self.window is not None and angles.local is not None else angles

    def context(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None,
        dropout: DropoutKeys | None,
    ) -> torch.Tensor:
        """Return the output of core attention for this rank's heads. Shapes: ``-> [s, b, n/tp * d]``."""
        return self._weighted(*self._query_key_value(x, angles, cache), pattern, dropout, angles)

    def _weighted(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: AttentionPattern,
        dropout: DropoutKeys | None,
        angles: RotaryAngles | None,
    ) -> torch.Tensor:
        if self.score_factor is not None:
            query = query * self.score_factor
        if angles is not None and angles.query_scale is not None:
            query = (query * angles.query_scale).to(query.dtype)
        if self.window is not None and self.window < key.shape[0] * self.cp.size:
            pattern = pattern.within(self.window)
        if self.training:
            for observe in self.logit_observers:
                observe(self, query, key, pattern)
        of_weights = None
        if self.training and self.dropout > 0.0:
            of_weights = require_keys(dropout).of_attention(self.layer_number, self.dropout, self.heads)
        sinks = self.core_attention()

        def attend(
            query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks: torch.Tensor | None
        ) -> torch.Tensor:
            return self._attend(AttentionInputs(query, key, value, pattern, of_weights, sinks))

        # Pass all tensors as arguments: recompute saves its arguments and nothing else.
        if self.recompute_core and self.training:
            return recompute(attend, query, key, value, sinks)
        return attend(query, key, value, sinks)

    def _query_key_value(
        self, x: torch.Tensor, angles: RotaryAngles | None, cache: KeyValueCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the queries of the new positions, and the keys and values of the new and the cached positions."""
        query, key, value = self.projected(x, angles)
        if cache is not None:
            key, value = cache.update(self.layer_number, key, value)
        return query, key, value

    def projected(
        self, x: torch.Tensor, angles: RotaryAngles | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values of the new positions, normalized and rotated as configured.

        Shapes: ``x: [s, b, h] -> [s, b, n/tp, d], [s, b, groups/tp, d], [s, b, groups/tp, d]``.
        """
        bias = None if (angles is not None and self.rotates_first) or self.clip is not None else self._bias_of_split(x)
        mixed = self.linear_qkv(x) if bias is None else self.linear_qkv(x, gives_bias_gradient=False)
        return self.split_heads(mixed, angles, bias)

    def split_heads(
        self, mixed: torch.Tensor, angles: RotaryAngles | None, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split the output of the fused projection, and normalize and rotate queries and keys as configured.

        If ``bias``, which is already added, is given, Triton computes its gradient.

        Shapes: ``mixed: [s, b, (n + 2 groups)/tp * d]``, or ``n + groups`` if keys are the values; results as those of
        `projected`.
        """
        if self.clip is not None:
            mixed = mixed.clamp(-self.clip, self.clip)
        mixed = mixed.view(*mixed.shape[:2], self.num_groups, -1, self.head_dim)
        if self.shares_keys:
            query, value = mixed.split_with_sizes((mixed.shape[3] - 1, 1), dim=3)
            query, value = query.flatten(2, 3), value.squeeze(3)
            key = value
            if angles is not None and self.rotates_first:
                query, key = self.rotate(query, key, angles)
        elif angles is not None and self.rotates_first:
            query, key, value = self.split_and_rotate(mixed, angles)
        else:
            query, key, value = split_projection(mixed, bias)
        if self.q_layernorm is not None and self.k_layernorm is not None:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if self.v_layernorm is not None:
            value = self.v_layernorm(value)
        if angles is not None and not self.rotates_first:
            query, key = self.rotate(query, key, angles)
        return query, key, value

    def rows_to_clip(self, eta: torch.Tensor, alpha: float) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the parameters that make queries and keys, with the factor of each row that scales the logits by eta.

        Queries are scaled by ``eta ** alpha`` and keys by ``eta ** (1 - alpha)``.

        Shapes: ``eta: [groups of rank]``; ``parameter: [rows, …]``, ``factors: [rows]``.
        """
        heads, dim = self.num_heads // self.num_groups, self.head_dim
        of_query, of_key, unchanged = eta**alpha, eta ** (1 - alpha), torch.ones_like(eta)
        queries = [(of_query, heads * dim)]
        if self.has_gate:
            queries.append((unchanged, heads * dim))
        keys = [(of_key, dim), (unchanged, dim)]
        linear = self.linear_qkv
        if isinstance(linear, SharedGroupQueryKeyValue):
            held = {"query": queries, "key_value": keys}
            parameters = {name: (f"{name}_weight", f"{name}_bias") for name in held}
        else:
            held, parameters = {"all": [*queries, *keys]}, {"all": ("weight", "bias")}
        for part, rows in held.items():
            factors = torch.cat([each[:, None].expand(-1, count) for each, count in rows], dim=1).flatten()
            for name in parameters[part]:
                parameter = getattr(linear, name)
                if parameter is not None:
                    yield parameter, factors

    def _bias_of_split(self, x: torch.Tensor) -> torch.Tensor | None:
        """Return the projection's bias if Triton sums its gradient while joining the QKV gradients, else None."""
        if self.shares_keys:
            return None
        bias = self.linear_qkv.bias if isinstance(self.linear_qkv, ColumnShardedLinear) else None
        return bias if bias is not None and bias.requires_grad and runs_on_triton(x, bias) else None

    def _attend(self, inputs: AttentionInputs) -> torch.Tensor:
        """Shapes: ``query: [s, b, n/tp, d] -> [s, b, n/tp * d]``."""
        context = self.core(inputs if self.biases is None else self.biases.extend(inputs))[..., : self.head_dim]
        return context.reshape(*context.shape[:2], -1)
