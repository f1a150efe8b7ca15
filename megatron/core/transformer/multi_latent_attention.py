"""Multi-head latent attention (MLA): keys and values of all heads come from one low-rank latent per token.

DeepSeek-AI 2024, https://arxiv.org/abs/2405.04434.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from megatron.core.ops import AttentionInputs, AttentionPattern, DropoutKeys, Fp8Quantizers
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import (
    ColumnShardedLinear,
    InputRegion,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    make_parameter,
    replicated_spec,
    several_saved_as_inputs,
    tensor_parallel_linear,
)
from megatron.core.transformer.attention import SelfAttention, value_width_of_core
from megatron.core.transformer.decoder_config import DecoderConfig
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles, apply_rotary


class ReplicatedLinear(nn.Module):
    """Linear layer whose weight is replicated on every tensor-parallel rank, for narrow inputs or outputs.

    Under sequence parallelism, or if ``is_split``, each rank computes its own part of the sequence. ``init_std`` is by
    default that of other weights.

    Shapes: ``[..., in] -> [..., out]``.
    """

    def __init__(
        self,
        config: DecoderConfig,
        in_features: int,
        out_features: int,
        tp: Group,
        device: torch.device | str,
        *,
        is_split: bool = False,
        has_bias: bool = False,
        init_std: float | None = None,
    ) -> None:
        super().__init__()
        self.tp, self.product_library = tp, config.cpu_gemm_backend
        self.quantizers: Fp8Quantizers | None = None
        shape, is_split = (out_features, in_features), is_split or config.sequence_parallel
        dtype, std = dtype_from_name(config.params_dtype), config.init_method_std if init_std is None else init_std
        self.weight = make_parameter(shape, replicated_spec("weight", shape, tp, is_split, std=std), dtype, device)
        self.bias: nn.Parameter | None = None
        if has_bias:
            self.bias = make_parameter(shape[:1], replicated_spec("bias", shape[:1], tp, is_split), dtype, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tensor_parallel_linear(
            *(x, self.weight, self.bias, InputRegion.SPLIT, self.tp),
            library=self.product_library,
            quantizers=self.quantizers,
        )


def _rotated(x: torch.Tensor, angles: RotaryAngles | None) -> torch.Tensor:
    """Rotate heads unless the model has no rotary position embeddings. Shapes: ``[s, b, n, p] -> [s, b, n, p]``."""
    return x if angles is None else apply_rotary(x, angles)


class LatentAttention(SelfAttention):
    """Multi-head latent attention (MLA): the KV cache stores only the latent vectors and the rotary parts of the keys.

    All heads share the rotary part of a key, which is not rotated in a model without rotary position embeddings.
    Queries, keys and values are padded with zeros to one width, which all kernels and all context-parallel exchanges
    accept. Values keep their width for kernels that support it.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def _add_projections(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        mla = config.mla
        self.tp, self.sequence_parallel = tp, config.sequence_parallel
        self.rank, self.rotary_width = mla.kv_lora_rank, mla.qk_pos_emb_head_dim
        self.plain_width, self.value_width = mla.qk_head_dim, mla.v_head_dim
        self.padded_width, self.core_value_width = mla.latent_head_width, value_width_of_core(config)

        def up(input_size: int, head_width: int) -> ColumnShardedLinear:
            return ColumnShardedLinear(
                input_size,
                config.num_attention_heads * head_width,
                tp,
                config=config,
                init_std=config.init_method_std,
                bias=False,
                device=device,
            )

        def norm(width: int) -> nn.Module:
            if not config.qk_layernorm:
                return nn.Identity()
            return Norm(
                config.normalization,
                width,
                config.epsilon_of_latent_norms,
                tp,
                partial_gradient=config.sequence_parallel,
                centered_weight=config.apply_layernorm_1p,
                dtype=dtype_from_name(config.params_dtype),
                device=device,
                transformer_impl=config.transformer_impl,
                parameters=config.norm_parameter_names,
            )

        if mla.q_lora_rank is None:
            self.linear_q_proj = up(config.hidden_size, mla.latent_query_width)
        else:
            self.linear_q_down_proj = ReplicatedLinear(config, config.hidden_size, mla.q_lora_rank, tp, device)
            self.linear_q_up_proj = up(mla.q_lora_rank, mla.latent_query_width)
        width = mla.kv_lora_rank + mla.qk_pos_emb_head_dim
        self.linear_kv_down_proj = ReplicatedLinear(config, config.hidden_size, width, tp, device)
        self.linear_kv_up_proj = up(mla.kv_lora_rank, mla.qk_head_dim + mla.v_head_dim)
        self.q_layernorm = norm(mla.q_lora_rank) if mla.q_lora_rank is not None else None
        self.kv_layernorm = norm(mla.kv_lora_rank)
        self.recomputes_up = "mla_up_proj" in config.recomputed_modules
        self.query_factor = config.latent_score_factor
        self.join_heads = join_heads

    def _factor_of_scores(self, config: DecoderConfig) -> float | None:
        """Return None: `_widen` scales the queries instead."""
        return None

    def context(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None,
        dropout: DropoutKeys | None,
    ) -> torch.Tensor:
        if not (self.recomputes_up and self.training):
            return super().context(x, pattern, angles, cache, dropout)
        narrow = self._narrow(x, angles, cache)
        widen = partial(self._widen, angles)
        heads = widen(*narrow)
        with several_saved_as_inputs(heads, widen, *narrow):
            return self._weighted(*heads, pattern, dropout, angles)

    def _query_key_value(
        self, x: torch.Tensor, angles: RotaryAngles | None, cache: KeyValueCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return self._widen(angles, *self._narrow(x, angles, cache))

    def _narrow(
        self, x: torch.Tensor, angles: RotaryAngles | None, cache: KeyValueCache | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the results of `_compressed`, of the new and the cached positions."""
        of_query, latent, rotary_key = self._compressed(x, angles)
        if cache is not None:
            latents, rotary_key = cache.update(self.layer_number, latent.unsqueeze(2), rotary_key)
            latent = latents.squeeze(2)
        return of_query, latent, rotary_key

    def _compressed(
        self, x: torch.Tensor, angles: RotaryAngles | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the input of the query up-projection, the key-value latent vectors, and the keys' rotary part.

        Shapes: ``-> [s, b, q]``, ``[s, b, r]``, ``[s, b, 1, p]``; the first two are ``[s/tp, ...]`` under sequence
        parallelism.
        """
        of_query = x if self.q_layernorm is None else self.q_layernorm(self.linear_q_down_proj(x))
        narrow: torch.Tensor = self.linear_kv_down_proj(x)
        latent, rotary_key = narrow.split_with_sizes((self.rank, self.rotary_width), dim=-1)
        latent = self.kv_layernorm(latent)
        if self.sequence_parallel:
            rotary_key = gather_from_sequence_parallel_region(rotary_key.contiguous(), group=self.tp)
        else:
            rotary_key = copy_to_tensor_model_parallel_region(rotary_key, self.tp)
        return of_query, latent, _rotated(rotary_key.unsqueeze(2), angles)

    def _widen(
        self, angles: RotaryAngles | None, of_query: torch.Tensor, latent: torch.Tensor, rotary_key: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values of this rank's heads, padded to the widths of `core`.

        Shapes: ``-> [s, b, n/tp, d], [s, b, n/tp, d], [s, b, n/tp, v]``.
        """
        query: torch.Tensor = (
            self.linear_q_proj(of_query) if self.q_layernorm is None else self.linear_q_up_proj(of_query)
        )
        return self.split_latent(query, self.linear_kv_up_proj(latent), rotary_key, angles)

    def split_latent(
        self, query: torch.Tensor, key_value: torch.Tensor, rotary_key: torch.Tensor, angles: RotaryAngles | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split the outputs of the up-projections into heads, rotate queries, and pad heads to the widths of `core`.

        Shapes: ``query: [s, b, n/tp * (qk + p)]``, ``key_value: [s, b, n/tp * (qk + v)]``, ``rotary_key: [s, b, 1, p]``
        ``-> [s, b, n/tp, d], [s, b, n/tp, d], [s, b, n/tp, v]``.
        """
        return self.join_heads(
            query.view(*query.shape[:2], self.num_heads, self.plain_width + self.rotary_width),
            key_value.view(*key_value.shape[:2], self.num_heads, self.plain_width + self.value_width),
            rotary_key,
            angles,
            value_width=self.value_width,
            padded_width=self.padded_width,
            core_value_width=self.core_value_width,
            query_factor=self.query_factor,
            copies_value=self.recomputes_up,
        )

    def rows_to_clip(self, eta: torch.Tensor, alpha: float) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield the up-projections, with the factor of each row.

        All heads share the rotary part of the keys, so the rotary part of the queries is scaled by eta.

        Shapes: ``eta: [n/tp]``; ``parameter: [rows, …]``, ``factors: [rows]``.
        """
        of_query = self.linear_q_proj if self.q_layernorm is None else self.linear_q_up_proj
        rows_of_heads = (
            (of_query.weight, ((eta**alpha, self.plain_width), (eta, self.rotary_width))),
            (
                self.linear_kv_up_proj.weight,
                ((eta ** (1 - alpha), self.plain_width), (torch.ones_like(eta), self.value_width)),
            ),
        )
        for weight, rows in rows_of_heads:
            yield weight, torch.cat([each[:, None].expand(-1, count) for each, count in rows], dim=1).flatten()

    def _attend(self, inputs: AttentionInputs) -> torch.Tensor:
        """Shapes: ``query: [s, b, n/tp, d] -> [s, b, n/tp * v]``."""
        context = self.core(inputs)[..., : self.value_width]
        return context.reshape(*context.shape[:2], -1)


def join_heads(
    query: torch.Tensor,
    key_value: torch.Tensor,
    rotary_key: torch.Tensor,
    angles: RotaryAngles | None,
    *,
    value_width: int,
    padded_width: int,
    core_value_width: int,
    query_factor: float,
    copies_value: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotate queries, give every head the common rotary part of the keys, and pad queries, keys and values.

    Without padding the value is a view of ``key_value``, unless ``copies_value``.

    Shapes: ``query: [s, b, n, qk + p]``, ``key_value: [s, b, n, qk + v]``, ``rotary_key: [s, b, 1, p]``
    ``-> [s, b, n, d], [s, b, n, d], [s, b, n, v]``.
    """

    def padded(heads: torch.Tensor, width: int) -> torch.Tensor:
        missing = width - heads.shape[-1]
        return F.pad(heads, (0, missing)) if missing else heads

    plain_width = key_value.shape[-1] - value_width
    plain, rotary = query.split_with_sizes((plain_width, query.shape[-1] - plain_width), dim=-1)
    query = padded(torch.cat((plain, _rotated(rotary, angles)), dim=-1), padded_width)
    if query_factor != 1.0:
        query = query * query_factor
    key, value = key_value.split_with_sizes((plain_width, value_width), dim=-1)
    key = padded(torch.cat((key, rotary_key.expand(-1, -1, key.shape[2], -1)), dim=-1), padded_width)
    value = padded(value, core_value_width)
    # A view would keep the wider tensor alive.
    return query, key, value.contiguous() if copies_value else value
