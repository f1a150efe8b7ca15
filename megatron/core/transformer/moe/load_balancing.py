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
    sequences: torch.Tensor,
    batch_size: int,
    num_tokens: int,
    config: MoEConfig,
    groups: ExpertGroups,
    tally: ExpertTally,
) -> tuple[AuxiliaryLoss, ...]:
    """Return the losses of a micro-batch, of which this rank has some tokens.

    ``sequences`` are the numbers of the tokens' sequences among ``batch_size``, and ``num_tokens`` how many the
    context-parallel rank has. The choices that count are those by the largest scores, whatever limits or moves them.

    Shapes: ``logits: [n, experts]``, ``sequences: [n]``.
    """
    kinds = config.moe_aux_losses
    losses: list[AuxiliaryLoss] = []
    if kinds:
        losses += _balancing_losses(logits, sequences, batch_size, num_tokens, config, groups, tally)
    if config.moe_z_loss_coeff:
        total = logits.logsumexp(dim=-1).square().sum()
        losses.append(_loss(Z_LOSS, _over_tp(total, groups), num_tokens, config.moe_z_loss_coeff))
    return tuple(losses)


def _balancing_losses(
    logits: torch.Tensor,
    sequences: torch.Tensor,
    batch_size: int,
    num_tokens: int,
    config: MoEConfig,
    groups: ExpertGroups,
    tally: ExpertTally,
) -> Iterator[AuxiliaryLoss]:
    scores = expert_scores(logits, config.moe_router_score_function)
    if config.moe_router_score_function == "sigmoid":
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    chosen = torch.zeros_like(scores).scatter_(1, scores.detach().topk(config.moe_router_topk, dim=1).indices, 1.0)
    # By sequence, of which the micro-batch is the sum.
    shape = batch_size, logits.shape[1]
    sums = scores.new_zeros(shape).index_add(0, sequences, scores)
    counts = scores.new_zeros(shape).index_add(0, sequences, chosen)
    sums = _over_tp(sums, groups)
    all_reduce(counts, groups.tp)
    all_reduce(counts, groups.cp)
    whole = num_tokens * groups.cp.size
    for kind, coefficient in config.moe_aux_losses.items():
        if kind == "seq_aux_loss":
            mean = _mean_product(sums, counts, num_tokens // batch_size, whole // batch_size, config) / batch_size
        elif kind == "aux_loss":
            mean = _mean_product(sums.sum(dim=0), counts.sum(dim=0), num_tokens, whole, config)
        else:
            assert kind == "global_aux_loss", kind
            so_far = tally.add_to_global_batch(counts.sum(dim=0), groups.dp)
            mean = _mean_product(sums.sum(dim=0), so_far, num_tokens, whole * groups.dp.size, config)
        yield _loss(LOSS_NAMES[kind], mean * num_tokens, num_tokens, coefficient)


def _mean_product(
    sums: torch.Tensor, counts: torch.Tensor, num_scores: int, num_counted: int, config: MoEConfig
) -> torch.Tensor:
    """Return experts x the sum of each one's mean score times its share of the choices; 1 where all are even."""
    assert config.num_experts is not None
    factor = config.num_experts / (config.moe_router_topk * num_scores * num_counted)
    return (sums * counts).sum() * factor


def _over_tp(total: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Sum over the ranks that share a micro-batch; each has the gradient of its own tokens."""
    return reduce_from_tensor_model_parallel_region(total, groups.tp)


def _loss(name: str, loss_sum: torch.Tensor, num_tokens: int, coefficient: float) -> AuxiliaryLoss:
    return AuxiliaryLoss(name, loss_sum, loss_sum.detach().new_full((), num_tokens), coefficient)
