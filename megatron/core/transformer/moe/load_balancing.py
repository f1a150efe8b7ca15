"""Auxiliary losses that even the load of experts, and the router's z-loss.

Fedus et al. 2021, https://arxiv.org/abs/2101.03961; Qiu et al. 2025, https://arxiv.org/abs/2501.11873;
Zoph et al. 2022, https://arxiv.org/abs/2202.08906.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from megatron.core.collectives import all_reduce
from megatron.core.layer_output import AuxiliaryLoss
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer.moe.expert_groups import ExpertGroups
from megatron.core.transformer.moe.expert_load import ExpertTally
from megatron.core.transformer.moe.moe_config import MoEConfig
from megatron.core.transformer.moe.routing import expert_scores
from megatron.core.transformer.moe.token_rows import TokenRows

LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""What each kind of --moe-router-load-balancing-type is called in the log."""
Z_LOSS = "z_loss"


def auxiliary_loss_names(config: MoEConfig) -> tuple[str, ...]:
    """Return the names of the losses that layers of experts leave."""
    if config.num_experts is None:
        return ()
    names = [LOSS_NAMES[kind] for kind in config.moe_aux_losses]
    return (*names, *([Z_LOSS] if config.moe_z_loss_coeff else []))


def router_losses(
    logits: torch.Tensor,
    rows: TokenRows,
    local_padding_mask: torch.Tensor | None,
    config: MoEConfig,
    groups: ExpertGroups,
    tally: ExpertTally,
) -> tuple[AuxiliaryLoss, ...]:
    """Return the losses of a micro-batch, of which this rank has some tokens.

    The losses count the choices by the largest scores, before capacity and expert bias apply. Padding is excluded from
    sums and token counts.

    Shapes: ``logits: [n, experts]``, ``local_padding_mask: [n]``.
    """
    lengths = None
    num_tokens: int | torch.Tensor = rows.num_tokens
    if rows.padding_mask is not None:
        lengths = rows.padding_mask.logical_not().sum(dim=1).to(logits.dtype)
        # Each context-parallel rank counts an equal share, whatever its own part of the sequences holds.
        num_tokens = lengths.sum() / groups.cp.size
    losses: list[AuxiliaryLoss] = []
    if config.moe_aux_losses:
        losses += _balancing_losses(logits, rows, local_padding_mask, lengths, num_tokens, config, groups, tally)
    if config.moe_z_loss_coeff:
        squares = logits.logsumexp(dim=-1).square()
        if local_padding_mask is not None:
            squares = squares.masked_fill(local_padding_mask, 0.0)
        losses.append(_loss(Z_LOSS, _over_tp(squares.sum(), groups), num_tokens, config.moe_z_loss_coeff))
    return tuple(losses)


def _balancing_losses(
    logits: torch.Tensor,
    rows: TokenRows,
    local_padding_mask: torch.Tensor | None,
    lengths: torch.Tensor | None,
    num_tokens: int | torch.Tensor,
    config: MoEConfig,
    groups: ExpertGroups,
    tally: ExpertTally,
) -> Iterator[AuxiliaryLoss]:
    scores = expert_scores(logits, config.moe_router_score_function)
    if config.moe_router_score_function == "sigmoid":
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    chosen = torch.zeros_like(scores).scatter_(1, scores.detach().topk(config.moe_router_topk, dim=1).indices, 1.0)
    if local_padding_mask is not None:
        scores, chosen = (each.masked_fill(local_padding_mask.unsqueeze(1), 0.0) for each in (scores, chosen))
    # By sequence, of which the micro-batch is the sum.
    batch_size, sequences = rows.batch_size, rows.sequences(logits.device)
    shape = batch_size, logits.shape[1]
    sums = scores.new_zeros(shape).index_add(0, sequences, scores)
    counts = scores.new_zeros(shape).index_add(0, sequences, chosen)
    sums = _over_tp(sums, groups)
    all_reduce(counts, groups.tp)
    all_reduce(counts, groups.cp)
    cp_size = groups.cp.size
    for kind, coefficient in config.moe_aux_losses.items():
        if kind == "seq_aux_loss" and lengths is None:
            length = rows.num_tokens // batch_size
            loss_sum = _mean_product(sums, counts, length, length * cp_size, config) / batch_size * num_tokens
        elif kind == "seq_aux_loss":
            assert lengths is not None
            of_sequences = (
                _mean_product(of_scores, of_choices, length / cp_size, length, config) * length / cp_size
                for of_scores, of_choices, length in zip(sums, counts, lengths.clamp(min=1.0))
            )
            loss_sum = torch.stack(list(of_sequences)).sum()
        elif kind == "aux_loss":
            whole = num_tokens * cp_size
            loss_sum = _mean_product(sums.sum(dim=0), counts.sum(dim=0), num_tokens, whole, config) * num_tokens
        else:
            assert kind == "global_aux_loss", kind
            so_far = tally.add_to_global_batch(counts.sum(dim=0), groups.dp)
            whole = num_tokens * cp_size * groups.dp.size
            if lengths is not None:
                whole = so_far.sum() / config.moe_router_topk
            loss_sum = _mean_product(sums.sum(dim=0), so_far, num_tokens, whole, config) * num_tokens
        yield _loss(LOSS_NAMES[kind], loss_sum, num_tokens, coefficient)


def _mean_product(
    sums: torch.Tensor,
    counts: torch.Tensor,
    num_scores: int | torch.Tensor,
    num_counted: int | torch.Tensor,
    config: MoEConfig,
) -> torch.Tensor:
    """Return experts x the sum of each one's mean score times its share of the choices; 1 where all are even."""
    assert config.num_experts is not None
    divisor = config.moe_router_topk * num_scores * num_counted
    if isinstance(divisor, torch.Tensor):
        # A micro-batch may be padding as a whole, with sums of 0.
        divisor = divisor.masked_fill(divisor == 0.0, 1.0)
    return (sums * counts).sum() * (config.num_experts / divisor)


def _over_tp(total: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Sum over the ranks that share a micro-batch; each has the gradient of its own tokens."""
    return reduce_from_tensor_model_parallel_region(total, groups.tp)


def _loss(name: str, loss_sum: torch.Tensor, num_tokens: int | torch.Tensor, coefficient: float) -> AuxiliaryLoss:
    if not isinstance(num_tokens, torch.Tensor):
        num_tokens = loss_sum.detach().new_full((), num_tokens)
    return AuxiliaryLoss(name, loss_sum, num_tokens, coefficient)
