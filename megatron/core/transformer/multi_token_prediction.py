"""Multi-token prediction (MTP): a chain of MTP modules after the model, their inputs, targets and losses.

Each module predicts one token further ahead. Gloeckle et al. 2024, https://arxiv.org/abs/2404.19737; DeepSeek-AI 2024,
https://arxiv.org/abs/2412.19437.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from megatron.core.collectives import all_gather_first_dim
from megatron.core.context_parallel import cut_sequence, to_sequence_order
from megatron.core.layer_output import AuxiliaryLoss, LayerOutput
from megatron.core.ops import AttentionPattern, DropoutKeys
from megatron.core.parallel_state import ExpertGroups
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import (
    ColumnShardedLinear,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.recompute import recompute
from megatron.core.transformer.decoder_config import DecoderConfig, MTPConfig, further_loss_names
from megatron.core.transformer.dropout import HiddenDropout, require_keys
from megatron.core.transformer.norm import make_norm
from megatron.core.transformer.rotary_pos_embedding import RotaryAngles
from megatron.core.transformer.transformer_layer import TransformerLayer


@dataclass(frozen=True, eq=False)
class FurtherTargets:
    """Input tokens and labels of ``n`` MTP modules, in order of depth.

    Tokens past the end of a sequence are 0. The mask is False past the end of a sequence or document. ``counts`` is the
    number of unmasked predictions in whole sequences.

    Shapes: ``tokens, labels, mask: [n, b, s/cp]``; ``counts: [n]`` int64.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    counts: torch.Tensor


def mtp_targets(
    labels: torch.Tensor,
    loss_mask: torch.Tensor | None,
    document_ids: torch.Tensor | None,
    number: int,
    cp: Group,
) -> FurtherTargets:
    """Shift the labels to get the inputs and labels of the MTP modules; collective over context-parallel ranks.

    Each rank has its part of the labels. ``document_ids`` covers whole sequences.

    Shapes: ``labels, loss_mask: [b, s/cp]``; ``document_ids: [b, s]``.
    """
    counts_here = torch.ones_like(labels) if loss_mask is None else (loss_mask != 0).to(labels.dtype)
    if cp.size > 1:
        both = torch.stack((labels.t(), counts_here.t()), dim=-1).contiguous()
        both = to_sequence_order(all_gather_first_dim(both, cp), cp.size, dim=0)
        labels, counts_here = both[..., 0].t(), both[..., 1].t()
    # The last label is not a token of the input sequence; as in Megatron, the input is 0 there, because routers count
    # tokens.
    tokens = labels.clone()
    tokens[:, -1] = 0
    found: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
    for distance in range(1, number + 1):
        mask = _ahead(counts_here, distance) != 0
        given, predicted = _ahead(tokens, distance - 1), _ahead(labels, distance)
        if document_ids is not None:
            mask &= _ahead(document_ids, distance) == document_ids
        found.append((given, predicted, mask))
    given, predicted, mask = (torch.stack(parts) for parts in zip(*found))
    counts = mask.sum(dim=(1, 2))
    given, predicted, mask = (cut_sequence(part, cp, dim=2) for part in (given, predicted, mask))
    return FurtherTargets(given, predicted, mask, counts)


def further_losses(
    per_token: Sequence[torch.Tensor], targets: FurtherTargets, config: MTPConfig, cp: Group
) -> Iterator[AuxiliaryLoss]:
    """Yield the loss of each MTP module, averaged over its unmasked tokens.

    Shapes: ``per_token: n x [b, s/cp]``.
    """
    coefficient = config.mtp_loss_scaling_factor / max(config.mtp_depth, 1)
    for name, loss, mask, count in zip(further_loss_names(config), per_token, targets.mask, targets.counts):
        # In the dtype of the loss: otherwise a quotient in a float64 run would be rounded to float32.
        yield AuxiliaryLoss(name, (loss * mask).sum(), count.to(loss.dtype) / cp.size, coefficient)


def _ahead(tensor: torch.Tensor, distance: int) -> torch.Tensor:
    """Shift left by ``distance`` along the sequence and fill with 0. Shapes: ``[b, s] -> [b, s]``."""
    end = tensor.new_zeros(tensor.shape[0], min(distance, tensor.shape[1]))
    return torch.cat((tensor[:, distance:], end), dim=1)


def further_layer_numbers(config: DecoderConfig) -> range:
    """Return the layer numbers that dropout uses for the MTP layers, followed by those for their embeddings."""
    return range(config.num_layers, config.num_layers + 2 * config.mtp.mtp_depth)


class MTPLayer(nn.Module):
    """MTP module: project hidden states joined with the embedding of a later token, and apply a transformer layer.

    ``depth`` counts from 0. The transformer layer has the settings of the model's last layer, and with
    --hybrid-override-pattern attention and a feed-forward.

    Shapes: ``[s, b, h], [s, b, h] -> [s, b, h]``; all are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(
        self,
        config: DecoderConfig,
        depth: int,
        tp: Group,
        device: torch.device | str,
        cp: Group | None,
        experts: ExpertGroups | None,
    ) -> None:
        super().__init__()
        self.tp, self.sequence_parallel = tp, config.sequence_parallel
        self.embedding_site = config.num_layers + config.mtp.mtp_depth + depth
        self.enorm = make_norm(config, tp, device)
        self.hnorm = make_norm(config, tp, device)
        self.eh_proj = ColumnShardedLinear(
            2 * config.hidden_size,
            config.hidden_size,
            tp,
            config=config,
            init_std=config.init_method_std,
            bias=False,
            device=device,
            gather_output=not config.sequence_parallel,
        )
        self.embedding_dropout = HiddenDropout(config.dropout_of_embeddings)
        self.transformer_layer = TransformerLayer(config, config.num_layers + depth, tp, device, cp, experts)
        self.final_layernorm = make_norm(config, tp, device)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        dropout: DropoutKeys | None,
        padding_mask: torch.Tensor | None = None,
    ) -> LayerOutput:
        """Return the normalized hidden states after the layer, and its auxiliary losses."""
        if self.embedding_dropout.is_active:
            embedded = self.embedding_dropout(embedded, require_keys(dropout).after_attention(self.embedding_site))
        self.transformer_layer.hand_keys(dropout)
        joined = self.eh_proj(torch.cat((self.enorm(embedded), self.hnorm(hidden)), dim=-1))
        if self.sequence_parallel:
            joined = gather_from_tensor_model_parallel_region(joined, self.tp)
            joined = scatter_to_sequence_parallel_region(joined, self.tp)
        hidden, losses = self.transformer_layer(joined, pattern, angles, None, dropout, None, padding_mask)
        return LayerOutput(self.final_layernorm(hidden), losses)


class MultiTokenPrediction(nn.Module):
    """The MTP modules of a model, on the last pipeline stage.

    ``made`` is called with each module before the next one is created.

    Shapes: ``[s, b, h] -> n x [s, b, h]``; all are ``[s/tp, b, h]`` under sequence parallelism.
    """

    def __init__(
        self,
        config: DecoderConfig,
        tp: Group,
        device: torch.device | str,
        cp: Group | None = None,
        experts: ExpertGroups | None = None,
        made: Callable[[nn.Module], None] = lambda layer: None,
    ) -> None:
        super().__init__()
        self.recomputes = config.recompute_granularity == "full"
        self.layers = nn.ModuleDict()
        for depth in range(config.mtp.mtp_depth):
            self.layers[str(depth)] = layer = MTPLayer(config, depth, tp, device, cp, experts)
            made(layer)

    def forward(
        self,
        hidden: torch.Tensor,
        embedded: torch.Tensor,
        pattern: AttentionPattern,
        angles: RotaryAngles | None,
        dropout: DropoutKeys | None,
        padding_mask: torch.Tensor | None = None,
    ) -> tuple[list[torch.Tensor], tuple[AuxiliaryLoss, ...]]:
        """Return the hidden states of each MTP module, and the modules' auxiliary losses.

        ``hidden`` are the model's last hidden states. ``embedded`` are the embeddings of the modules' input tokens,
        concatenated along the batch.

        Shapes: ``embedded: [s, n * b, h]``.
        """
        states: list[torch.Tensor] = []
        losses: tuple[AuxiliaryLoss, ...] = ()
        for layer, tokens in zip(self.layers.values(), embedded.chunk(len(self.layers), dim=1)):
            arguments = hidden, tokens, pattern, angles, dropout, padding_mask
            is_again = self.recomputes and self.training
            output = recompute(layer, *arguments) if is_again else layer(*arguments)
            hidden, found = cast("LayerOutput", output)
            states.append(hidden)
            losses += found
        return states, losses
