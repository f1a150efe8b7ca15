"""DeepSeek sparse attention (DSA): MLA in which an indexer selects the keys of each query.

DeepSeek-AI 2025, https://arxiv.org/abs/2512.02556. As in Megatron-LM every tensor-parallel rank has the whole indexer
and computes its scores for whole sequences. It is trained by its own loss alone, which does not reach the rest of the
model.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial

import torch
from torch import nn

from megatron.core.collectives import all_reduce
from megatron.core.context_parallel import positions_of, to_sequence_order
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
    """Linear layer of the indexer, replicated on every tensor-parallel rank.

    ``is_cut`` states that each rank computes its own part of the sequence. The layer is never quantized, since rounding
    would change the selected keys.

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
        is_cut: bool,
    ) -> None:
        super().__init__()
        self.tp, self.product_library = tp, config.cpu_gemm_backend
        shape = (out_features, in_features)
        spec = replicated_spec("weight", shape, tp, is_cut, std=config.init_method_std)
        self.weight = make_parameter(shape, spec, dtype_from_name(config.params_dtype), device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return tensor_parallel_linear(x, self.weight, None, InputRegion.SPLIT, self.tp, library=self.product_library)


class Indexer(nn.Module):
    """Lightning indexer: queries of several heads, one key per position, and a weight per query and head.

    The last channels of queries and keys are rotated, as in MLA.
    """

    def __init__(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        super().__init__()
        mla = config.mla
        assert mla.dsa_indexer_n_heads is not None, "the checks require it"
        assert mla.dsa_indexer_head_dim is not None, "the checks require it"
        self.num_heads, self.width = mla.dsa_indexer_n_heads, mla.dsa_indexer_head_dim
        self.rotary_width = mla.qk_pos_emb_head_dim
        self.tp, self.sequence_parallel = tp, config.sequence_parallel
        hidden, is_cut = config.hidden_size, config.sequence_parallel
        input_width = hidden if mla.q_lora_rank is None else mla.q_lora_rank
        self.linear_wq_b = IndexerLinear(config, input_width, self.num_heads * self.width, tp, device, is_cut=False)
        self.linear_wk = IndexerLinear(config, hidden, self.width, tp, device, is_cut=is_cut)
        self.k_norm = Norm(
            *("LayerNorm", self.width, config.epsilon_of_latent_norms, tp),
            partial_gradient=is_cut,
            centered_weight=config.apply_layernorm_1p,
            dtype=dtype_from_name(config.params_dtype),
            device=device,
            transformer_impl=config.transformer_impl,
        )
        self.linear_weights_proj = IndexerLinear(config, hidden, self.num_heads, tp, device, is_cut=is_cut)

    def keys_and_weights(self, x: torch.Tensor, angles: RotaryAngles | None) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the keys of the positions, and the weight of each head's scores, with their scale.

        Shapes: ``[s, b, h] -> [s, b, 1, d], [s, b, n]``; the input is ``[s/tp, b, h]`` under sequence parallelism.
        """
        x = x.detach()
        key, weights = self.k_norm(self.linear_wk(x)), self.linear_weights_proj(x)
        if self.sequence_parallel:
            # Every rank computes the same loss, so the gradient is whole on each.
            both = torch.cat((key, weights), dim=-1)
            both = gather_from_sequence_parallel_region(both, tensor_parallel_output_grad=False, group=self.tp)
            key, weights = both.split_with_sizes((self.width, self.num_heads), dim=-1)
        return self._rotated(key.unsqueeze(2), angles), weights * (self.num_heads * self.width) ** -0.5

    def queries(self, of_query: torch.Tensor, angles: RotaryAngles | None) -> torch.Tensor:
        """Return the queries of the positions.

        Shapes: ``[s, b, q] -> [s, b, n, d]``; the input is ``[s/tp, b, q]`` under sequence parallelism.
        """
        of_query = of_query.detach()
        if self.sequence_parallel:
            of_query = gather_from_sequence_parallel_region(of_query, group=self.tp)
        queries = self.linear_wq_b(of_query)
        return self._rotated(queries.view(*queries.shape[:2], self.num_heads, self.width), angles)

    def _rotated(self, heads: torch.Tensor, angles: RotaryAngles | None) -> torch.Tensor:
        if angles is None:
            return heads
        plain, rotary = heads.split_with_sizes((self.width - self.rotary_width, self.rotary_width), dim=-1)
        return torch.cat((plain, apply_rotary(rotary, angles)), dim=-1)


class SparseLatentAttention(LatentAttention):
    """MLA over the keys that the indexer selects for each query, with an additional mask of all queries and keys.

    The KV cache stores the indexer's keys with the rotary parts of the keys. Under context parallelism a rank selects
    the keys of its own queries among the gathered keys of all ranks.

    Shapes: ``[s, b, h] -> [s, b, h]``; both are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def _add_projections(self, config: DecoderConfig, tp: Group, device: torch.device | str) -> None:
        super()._add_projections(config, tp, device)
        mla = config.mla
        self.has_indexer = config.has_indexer(self.layer_number)
        assert mla.dsa_indexer_topk is not None, "the checks require it"
        self.topk, self.loss_coeff = mla.dsa_indexer_topk, mla.dsa_indexer_loss_coeff or 0.0
        self.compares_selected = mla.dsa_indexer_use_sparse_loss
        if self.has_indexer:
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
        index_key = weights = None
        if self.has_indexer:
            index_key, weights = self.indexer.keys_and_weights(x, angles)
            index_key = self._of_all_ranks(index_key)
        if cache is not None:
            kept = rotary_key if index_key is None else torch.cat((rotary_key, index_key), dim=-1)
            latents, kept = cache.update(self.layer_number, latent.unsqueeze(2), kept)
            latent, rotary_key = latents.squeeze(2), kept[..., : self.rotary_width]
            index_key = None if index_key is None else kept[..., self.rotary_width :]
        narrow, widen = (of_query, latent, rotary_key), partial(self._widen, angles)
        heads = widen(*narrow)
        losses: tuple[AuxiliaryLoss, ...] = ()
        if index_key is not None and weights is not None:
            pattern, losses = self._select(of_query, index_key, weights, heads, pattern, angles)
        else:
            selected = pattern.selected
            assert selected is not None, "layers that share selected keys are in one model chunk"
            assert selected.is_known, "the first layer of a model chunk has an indexer"
            if selected.mask is not None:
                pattern = replace(pattern, document_ids=None, mask=selected.mask)
        recomputes = self.recomputes_up and self.training
        with several_saved_as_inputs(heads, widen, *narrow) if recomputes else nullcontext():
            context = self._weighted(*heads, pattern, dropout, angles)
        return LayerOutput(self.linear_proj(context), losses)

    def _of_all_ranks(self, keys: torch.Tensor) -> torch.Tensor:
        """All-gather keys of the context-parallel ranks; backward: a reduce-scatter, as each rank has its own queries.

        Shapes: ``[s/cp, ...] -> [s, ...]``.
        """
        if self.cp.size == 1:
            return keys
        return to_sequence_order(gather_from_sequence_parallel_region(keys, group=self.cp), self.cp.size, dim=0)

    def _select(
        self,
        of_query: torch.Tensor,
        index_key: torch.Tensor,
        weights: torch.Tensor,
        heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
    ) -> tuple[AttentionPattern, tuple[AuxiliaryLoss, ...]]:
        """Return the pattern of the selected keys, and in training the indexer loss.

        Under context parallelism ``index_key`` are the keys of all ranks.

        Shapes: ``index_key: [sk, b, 1, d]``, ``weights: [sq, b, n]``; ``heads`` as in `_widen`.
        """
        num_queries, num_keys = len(heads[0]), len(index_key)
        has_loss, has_choice = self.training and self.loss_coeff > 0.0, num_keys > self.topk
        selected = None
        losses: tuple[AuxiliaryLoss, ...] = ()
        if has_loss or has_choice:
            scores = index_scores(self.indexer.queries(of_query, angles), index_key.squeeze(2), weights)
            if self.cp.size > 1:
                positions = positions_of(self.cp.rank, self.cp.size, num_keys, scores.device)
                matrix = pattern.visible(positions, torch.arange(num_keys, device=scores.device))
            else:
                matrix = pattern.matrix(num_queries, num_keys, scores.device)
            if matrix is None:
                matrix = torch.ones((1, 1, num_queries, num_keys), dtype=torch.bool, device=scores.device)
            visible = matrix.squeeze(1)
            if has_choice:
                selected = select_keys(scores, visible, self.topk)
                visible = selected if self.compares_selected else visible
            if has_loss:
                losses = (self._loss(scores, visible, heads),)
        mask = None if selected is None else selected.unsqueeze(1)
        if pattern.selected is not None:
            pattern.selected.mask, pattern.selected.is_known = mask, True
        return pattern if mask is None else replace(pattern, document_ids=None, mask=mask), losses

    def _loss(
        self, scores: torch.Tensor, visible: torch.Tensor, heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    ) -> AuxiliaryLoss:
        """Return the loss over the visible keys; as in Megatron-LM the reported loss includes the coefficient.

        Shapes: ``scores: [b, sq, sk]``, ``visible: [b or 1, sq, sk]`` of bool.
        """
        query, key, _ = heads
        attention = attention_of_all_heads(query.detach(), self._of_all_ranks(key.detach()), visible)
        all_reduce(attention, self.tp)
        loss_sum = indexer_divergence(scores, visible, attention) * self.loss_coeff
        num_tokens = loss_sum.detach().new_full((), scores.shape[0] * scores.shape[1])
        return AuxiliaryLoss(INDEXER_LOSS, loss_sum, num_tokens, 1.0)
