"""The tokens that lie further ahead than the next one: what each position is given of them, and what it predicts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_gather_first_dim
from megatron.core.context_parallel.partition import cut_sequence, to_sequence_order
from megatron.core.layer_output import AuxiliaryLoss
from megatron.core.process_group import Group
from megatron.core.transformer.multi_token_prediction.prediction_config import PredictionConfig, further_loss_names


@dataclass(frozen=True, eq=False)
class FurtherTargets:
    """Hold the tokens that each of ``n`` further predictions is given and predicts, the nearest first.

    Where a sequence ends before them, tokens are 0; where it or a document does, the mask is False. ``counts`` are the
    numbers of predictions that count, in whole sequences.

    Shapes: ``tokens, labels, mask: [n, b, s/cp]``; ``counts: [n]`` int64.
    """

    tokens: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor
    counts: torch.Tensor


def further_targets(
    labels: torch.Tensor,
    loss_mask: torch.Tensor | None,
    document_ids: torch.Tensor | None,
    number: int,
    cp: Group,
) -> FurtherTargets:
    """Return the tokens behind the labels of each position; collective over context-parallel ranks.

    Each rank has its part of the labels, which are the tokens that follow; the documents are of whole sequences.

    Shapes: ``labels, loss_mask: [b, s/cp]``; ``document_ids: [b, s]``.
    """
    counts_here = torch.ones_like(labels) if loss_mask is None else (loss_mask != 0).to(labels.dtype)
    if cp.size > 1:
        both = torch.stack((labels.t(), counts_here.t()), dim=-1).contiguous()
        both = to_sequence_order(all_gather_first_dim(both, cp), cp.size, dim=0)
        labels, counts_here = both[..., 0].t(), both[..., 1].t()
    # The last label is no token of the sequence, and layers are given none of it, as in Megatron: routers count tokens.
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
    per_token: Sequence[torch.Tensor], targets: FurtherTargets, config: PredictionConfig, cp: Group
) -> Iterator[AuxiliaryLoss]:
    """Yield the loss of each further token, by its mean over those that count.

    Shapes: ``per_token: n x [b, s/cp]``.
    """
    coefficient = config.mtp_loss_scaling_factor / max(config.num_further_tokens, 1)
    for name, loss, mask, count in zip(further_loss_names(config), per_token, targets.mask, targets.counts):
        # In the dtype of the loss: in a float64 run a third would be rounded to float32 otherwise.
        yield AuxiliaryLoss(name, (loss * mask).sum(), count.to(loss.dtype) / cp.size, coefficient)


def _ahead(tensor: torch.Tensor, distance: int) -> torch.Tensor:
    """Return at each position what stands ``distance`` behind it; 0 beyond the end. Shapes: ``[b, s] -> [b, s]``."""
    end = tensor.new_zeros(tensor.shape[0], min(distance, tensor.shape[1]))
    return torch.cat((tensor[:, distance:], end), dim=1)
