"""DeepSeek sparse attention (DSA): MLA in which an indexer selects the keys of each query.

DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556. As in Megatron-LM every tensor-parallel rank has the whole indexer
and computes it for whole sequences. It is trained by its own loss alone, which does not reach the rest of the model.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megatron.core.collectives import all_reduce
from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.ops import (
    AttentionPattern,
    DropoutKeys,
    attention_of_all_heads,
    index_scores,
    indexer_divergence,
    select_keys,
)
from megatron.core.precision import dtype_from_name
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import (
    InputRegion,
    gather_from_sequence_parallel_region,
    make_parameter,
    replicated_spec,
    several_saved_as_inputs,
    tensor_parallel_linear,
)
from megatron.core.transformer.decoder_config import INDEXER_LOSS, DecoderConfig
from megatron.core.transformer.kv_cache import KeyValueCache
from megatron.core.transformer.multi_latent_attention import LatentAttention
from megatron.core.transformer.norm import Norm
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles, apply_rotary


class IndexerLinear(nn.Module):
    """Linear layer of the indexer, replicated on every tensor-parallel rank and computed for whole sequences.

    It is never quantized, since its rounding would change the selected keys.

    Shapes: ``[..., in] -> [..., out]``.
    """

    def __init__(
        self, config: DecoderConfig, in_features: int, out_features: int, tp: Group, device: torch.device | str
    ) -> None:
        super().__init__()
        self.tp, self.product_library = tp, config.cpu_gemm_backend
        shape = (out_features, in_features)
        spec = replicated_spec("weight", shape, tp, False, std=config.init_method_std)
        self.weight = make_parameter(shape, spec, dtype_from_name(config.params_dtype), device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tensor_parallel_linear(
            x, self.weight, None, InputRegion.SPLIT, self.tp, library=self.product_library
        )


class Indexer(nn.Module):
    """Lightning indexer: queries of several heads, one key per position, and a weight per query and head.

    The last channels of queries and keys are rotated, like those of MLA.
    """

    def __init__(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        mla = config.mla
        assert mla.dsa_indexer_n_heads is not None and mla.dsa_indexer_head_dim is not None, "the checks require them"
        self.num_heads, self.width = mla.dsa_indexer_n_heads, mla.dsa_indexer_head_dim
        self.rotary_width = mla.qk_pos_emb_head_dim
        input_width = config.hidden_size if mla.q_lora_rank is None else mla.q_lora_rank
        self.linear_wq_b = IndexerLinear(config, input_width, self.num_heads * self.width, tp, device)
        self.linear_wk = IndexerLinear(config, config.hidden_size, self.width, tp, device)
        self.k_norm = Norm(
            *("LayerNorm", self.width, config.epsilon_of_latent_norms, tp),
            partial_gradient=False,
            centered_weight=config.apply_layernorm_1p,
            dtype=dtype_from_name(config.params_dtype),
            device=device,
            transformer_impl=config.transformer_impl,
        )
        self.linear_weights_proj = IndexerLinear(config, config.hidden_size, self.num_heads, tp, device)

    def keys(self, x: torch.Tensor, angles: RotaryAngles | None) -> torch.Tensor:
        """Return the keys of the positions. Shapes: ``[s, b, h] -> [s, b, 1, d]``."""
        return self._rotated(self.k_norm(self.linear_wk(x)).unsqueeze(2), angles)

    def queries(self, of_query: torch.Tensor, angles: RotaryAngles | None) -> torch.Tensor:
        """Return the queries of the positions. Shapes: ``[s, b, q] -> [s, b, n, d]``."""
        queries = self.linear_wq_b(of_query)
        return self._rotated(queries.view(*queries.shape[:2], self.num_heads, self.width), angles)

    def weights(self, x: torch.Tensor) -> torch.Tensor:
        """Return the weight of each head's scores, with their scale. Shapes: ``[s, b, h] -> [s, b, n]``."""
        return self.linear_weights_proj(x) * (self.num_heads * self.width) ** -0.5

    def _rotated(self, heads: torch.Tensor, angles: RotaryAngles | None) -> torch.Tensor:
        if angles is None:
            return heads
        plain, rotary = heads.split_with_sizes((self.width - self.rotary_width, self.rotary_width), dim=-1)
        return torch.cat((plain, apply_rotary(rotary, angles)), dim=-1)


class SparseLatentAttention(LatentAttention):
    """MLA over the keys that the indexer selects for each query, with an additional mask of all queries and keys.

    The KV cache stores the indexer's keys with the rotary parts of the keys.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def _add_projections(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        super()._add_projections(config, tp, device)
        mla = config.mla
        assert mla.dsa_indexer_topk is not None, "the checks require it"
        self.topk, self.loss_coeff = mla.dsa_indexer_topk, mla.dsa_indexer_loss_coeff or 0.0
        self.compares_selected = mla.dsa_indexer_use_sparse_loss
        # Under Megatron-LM's name.
        self.core_attention.indexer = Indexer(config, tp, device)

    @property
    def indexer(self) -> Indexer:
        module = self.core_attention.indexer
        assert isinstance(module, Indexer)
        return module

    def forward(
        self,
        x: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        cache: KeyValueCache | None = None,
        dropout: DropoutKeys | None = None,
    ) -> LayerOutput:
        """Return the attention output, and in training the indexer loss.

        Raises:
            ConfigurationError: attention dropout is active in training, and ``dropout`` is None.
        """
        if not self.has_rotary:
            angles = None
        of_query, latent, rotary_key = self._compressed(x, angles)
        given, asking = self._whole(x), self._whole(of_query)
        index_key = self.indexer.keys(given, angles)
        if cache is not None:
            kept = torch.cat((rotary_key, index_key), dim=-1)
            latents, kept = cache.update(self.layer_number, latent.unsqueeze(2), kept)
            latent = latents.squeeze(2)
            rotary_key, index_key = kept.split_with_sizes((self.rotary_width, self.indexer.width), dim=-1)
        narrow, widen = (of_query, latent, rotary_key), partial(self._widen, angles)
        query, key, value = widen(*narrow)
        losses: tuple[AuxiliaryLoss, ...] = ()
        trains = self.training and self.loss_coeff > 0.0
        if trains or key.shape[0] > self.topk:
            queries, weights = self.indexer.queries(asking, angles), self.indexer.weights(given)
            scores = index_scores(queries, index_key.squeeze(2), weights)
            pattern, losses = self._restrict(scores, query, key, pattern)
        recomputes = self.recomputes_up and self.training
        heads = query, key, value
        with several_saved_as_inputs(heads, widen, *narrow) if recomputes else nullcontext():
            context = self._weighted(*heads, pattern, dropout, angles)
        return LayerOutput(self.linear_proj(context), losses)

    def _whole(self, x: torch.Tensor) -> torch.Tensor:
        """Return the whole sequence without a gradient. Shapes: ``[s/tp, b, h] -> [s, b, h]``."""
        detached = x.detach()
        return gather_from_sequence_parallel_region(detached, group=self.tp) if self.sequence_parallel else detached

    def _restrict(
        self, scores: torch.Tensor, query: torch.Tensor, key: torch.Tensor, pattern: AttentionPattern
    ) -> tuple[AttentionPattern, tuple[AuxiliaryLoss, ...]]:
        """Return the pattern of the selected keys, and in training the indexer loss.

        Shapes: ``scores: [b, sq, sk]``, ``query: [sq, b, n/tp, d]``, ``key: [sk, b, n/tp, d]``.
        """
        num_queries, num_keys = query.shape[0], key.shape[0]
        matrix = pattern.matrix(num_queries, num_keys, query.device)
        if matrix is None:
            visible = torch.ones((1, num_queries, num_keys), dtype=torch.bool, device=query.device)
        else:
            visible = matrix.squeeze(1)
        selected = visible
        if num_keys > self.topk:
            selected = select_keys(scores, visible, self.topk)
            pattern = replace(pattern, document_ids=None, mask=selected.unsqueeze(1))
        if not (self.training and self.loss_coeff > 0.0):
            return pattern, ()
        compared = selected if self.compares_selected else visible
        attention = attention_of_all_heads(query.detach(), key.detach(), compared)
        all_reduce(attention, self.tp)
        loss_sum = indexer_divergence(scores, compared, attention) * self.loss_coeff
        # As in Megatron-LM the reported loss includes the coefficient.
        num_tokens = loss_sum.detach().new_full((), scores.shape[0] * num_queries)
        return pattern, (AuxiliaryLoss(INDEXER_LOSS, loss_sum, num_tokens, 1.0),)
