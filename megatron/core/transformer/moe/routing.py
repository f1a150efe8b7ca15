"""Top-k routing as functions of the router's logits: scores, chosen experts, weights, capacity and kept choices.

`TokenRows` describes the tokens that a rank routes. Each token of a micro-batch is routed on exactly one rank.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.core.context_parallel import positions_of
from megatron.core.process_group import Group
from megatron.core.transformer import INDEPENDENT_SCORES, MoEConfig

ROUTER_DTYPES = {"fp32": torch.float32, "fp64": torch.float64}
"""Dtype of each --moe-router-dtype."""


@dataclass(frozen=True)
class TokenRows:
    """The tokens that this rank routes; each tensor-parallel rank has ``num_rows`` rows of the micro-batch.

    Tokens are in the order of ``[s, b]``: the sequences are interleaved. ``num_tokens`` is the total over these ranks,
    and ``first`` is the number of this rank's first token. Rows after the last token are empty. ``padding_mask`` is
    True at padding positions of the whole sequences, and None without padding.

    Shapes: ``padding_mask: [b, s]``.
    """

    num_rows: int
    num_tokens: int
    batch_size: int
    first: int
    padding_mask: torch.Tensor | None = None

    @property
    def num_real(self) -> int:
        return max(min(self.num_rows, self.num_tokens - self.first), 0)

    def numbers(self, device: torch.device) -> torch.Tensor:
        """Return the numbers of the tokens. Shapes: ``-> [num_real]`` int64."""
        return torch.arange(self.first, self.first + self.num_real, device=device)

    def sequences(self, device: torch.device) -> torch.Tensor:
        """Return the sequence of each token. Shapes: ``-> [num_real]`` int64."""
        return self.numbers(device) % self.batch_size

    def positions(self, cp: Group, device: torch.device) -> torch.Tensor:
        """Return each token's number in the whole micro-batch, over all context-parallel ranks.

        Shapes: ``-> [num_real]`` int64.
        """
        numbers = self.numbers(device)
        if cp.size == 1:
            return numbers
        places = numbers.div(self.batch_size, rounding_mode="floor")
        length = self.num_tokens // self.batch_size * cp.size
        return positions_of(cp.rank, cp.size, length, device)[places] * self.batch_size + numbers % self.batch_size

    def local_padding_mask(self, cp: Group, device: torch.device) -> torch.Tensor | None:
        """Return the padding mask of this rank's tokens, or None. Shapes: ``-> [num_real]`` bool."""
        if self.padding_mask is None:
            return None
        return self.padding_mask.t().reshape(-1)[self.positions(cp, device)]


_TINY = 1e-20


def expert_scores(logits: torch.Tensor, function: str) -> torch.Tensor:
    """Return the score of every expert: the sigmoid or sqrt(softplus) of each logit, or a softmax over the experts.

    Shapes: ``[n, experts] -> [n, experts]``.
    """
    if function == "sigmoid":
        return logits.sigmoid()
    if function == "sqrtsoftplus":
        # The derivative of the root is infinite at 0, to which softplus underflows.
        return (F.softplus(logits) + torch.finfo(logits.dtype).tiny).sqrt()
    assert function in ("softmax", "sparsemixer"), function
    return logits.softmax(dim=-1)


def choose_experts(
    logits: torch.Tensor, config: MoEConfig, expert_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights, as configured (`topk_experts`)."""
    return topk_experts(
        logits,
        config.moe_router_topk,
        use_pre_softmax=config.moe_router_pre_softmax,
        num_groups=config.moe_router_num_groups,
        group_topk=config.moe_router_group_topk,
        group_score_topk=config.group_score_topk,
        scaling_factor=config.moe_router_topk_scaling_factor,
        score_function=config.moe_router_score_function,
        sparsemixer_eps=config.moe_router_sparsemixer_eps,
        expert_bias=expert_bias,
    )


def topk_experts(
    logits: torch.Tensor,
    topk: int,
    *,
    use_pre_softmax: bool = False,
    num_groups: int | None = None,
    group_topk: int | None = None,
    group_score_topk: int | None = None,
    scaling_factor: float | None = None,
    score_function: str = "softmax",
    sparsemixer_eps: float = 0.01,
    expert_bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token and their weights, the best first.

    With ``expert_bias`` the choice uses score plus bias, and the weights use the score alone. See `best_experts` for
    the arguments of group-limited routing.

    Shapes: ``logits: [n, experts]``, ``expert_bias: [experts] -> [n, k]`` int64 and ``[n, k]``.
    """
    if score_function == "softmax" and not use_pre_softmax:
        ranked = logits if expert_bias is None else expert_scores(logits.detach(), score_function) + expert_bias
        indices = best_experts(ranked, topk, num_groups, group_topk, group_score_topk)
        weights = logits.gather(1, indices).softmax(dim=-1)
    elif score_function == "sparsemixer":
        indices = best_experts(logits, topk, num_groups, group_topk)
        weights = sparsemixer_weights(logits, indices, sparsemixer_eps)
    else:
        scores = expert_scores(logits, score_function)
        ranked = scores if expert_bias is None else scores + expert_bias
        indices = best_experts(ranked, topk, num_groups, group_topk, group_score_topk)
        weights = scores.gather(1, indices)
        if score_function in INDEPENDENT_SCORES and topk > 1:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _TINY)
    return indices, weights if scaling_factor is None else weights * scaling_factor


_SINKHORN_ROUNDS = 64


def sinkhorn(cost: torch.Tensor, tol: float = 0.0001, is_counted: torch.Tensor | None = None) -> torch.Tensor:
    """Scale the rows and columns of ``exp(cost)`` until tokens have equal sums and experts have equal sums.

    Each round makes the sums of the rows equal, then the sums of the columns (Sinkhorn and Knopp 1967; for routing,
    Clark et al. 2022, https://arxiv.org/abs/2202.01169). When the sum of every row is within ``tol`` of its share,
    relatively, further rounds change nothing. There are 64 rounds at most, because widely spread costs converge slowly.
    The number of rounds that run does not depend on the values, so that the host does not wait for the device.

    Rows at which ``is_counted`` is False have no influence, and their result is 0.

    Shapes: ``[n, experts] -> [n, experts]``, ``is_counted: [n]``.
    """
    # The largest cost of a row does not change the result, and without it exp does not overflow.
    scores = (cost - cost.amax(dim=1, keepdim=True)).exp()
    num_rows: int | torch.Tensor = scores.shape[0]
    if is_counted is not None:
        scores, num_rows = scores * is_counted.unsqueeze(1), is_counted.sum()
    num_columns, tiny = scores.shape[1], 1e-8
    rows, columns = torch.zeros_like(scores[:, 0]), scores.new_ones(num_columns)
    for _ in range(_SINKHORN_ROUNDS):
        sums = scores @ columns
        is_near = (rows * sums * num_rows - 1.0).abs() <= tol
        if is_counted is not None:
            is_near = is_near | ~is_counted
        is_balanced = is_near.all()
        rows = torch.where(is_balanced, rows, 1.0 / (num_rows * (sums + tiny)))
        columns = torch.where(is_balanced, columns, 1.0 / (num_columns * (rows @ scores + tiny)))
    return columns * scores * rows.unsqueeze(1)


def sinkhorn_experts(
    logits: torch.Tensor, topk: int, balanced: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the experts of each token, the best first, and their scores as weights, as Megatron-LM's Sinkhorn routing.

    The scores are a softmax over all experts, or with one expert per token sigmoids. ``balanced``, the result of
    `sinkhorn`, chooses the experts in training. In evaluation it is None, and the scores choose.

    Shapes: ``logits, balanced: [n, experts] -> [n, k]`` int64 and ``[n, k]``.
    """
    scores = expert_scores(logits, "sigmoid" if topk == 1 else "softmax")
    indices = (scores if balanced is None else balanced).topk(topk, dim=1).indices
    return indices, scores.gather(1, indices)


def sparsemixer_weights(logits: torch.Tensor, indices: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the weights of chosen experts, the best first, as SparseMixer-v2 computes them in evaluation.

    The weight of a choice is its softmax over the experts that were not chosen before and whose logits are lower by at
    most ``2 eps``, relative to the larger of the best logit and their own magnitude. Liu et al. 2024,
    https://arxiv.org/abs/2409.12136. In training the gradient of these weights is used: the choice is not sampled, and
    the paper's estimate of the gradient of the choice is not used.

    Shapes: ``logits: [n, experts]``, ``indices: [n, k] -> [n, k]``.
    """
    weights, remaining = [], logits
    for chosen in indices.chunk(indices.shape[1], dim=1):
        with torch.no_grad():
            best = logits.gather(1, chosen)
            is_much_worse = (best - logits) / torch.maximum(logits.abs(), best) > 2 * eps
        weights.append(remaining.masked_fill(is_much_worse, -math.inf).softmax(dim=-1).gather(1, chosen))
        remaining = remaining.scatter(1, chosen, -math.inf)
    return torch.cat(weights, dim=1)


@torch.no_grad()
def best_experts(
    scores: torch.Tensor,
    topk: int,
    num_groups: int | None,
    group_topk: int | None,
    group_score_topk: int | None = None,
) -> torch.Tensor:
    """Return the experts with the largest scores, with group-limited routing only those of the best groups.

    The sum of the ``group_score_topk`` largest scores of a group, by default ``topk // group_topk``, ranks it.

    Shapes: ``[n, experts] -> [n, k]`` int64.
    """
    if num_groups is not None and group_topk is not None:
        by_group = scores.view(len(scores), num_groups, scores.shape[1] // num_groups)
        of_group = by_group.topk(group_score_topk or max(topk // group_topk, 1), dim=-1).values.sum(dim=-1)
        chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(1, of_group.topk(group_topk).indices, True)
        scores = by_group.masked_fill(~chosen.unsqueeze(-1), -math.inf).view_as(scores)
    return scores.topk(topk, dim=-1).indices


def expert_capacity(num_tokens: int, config: MoEConfig) -> int | None:
    """Return the maximum number of tokens per expert for ``num_tokens`` tokens; None without a capacity limit."""
    if config.moe_expert_capacity_factor is None or config.num_experts is None:
        return None
    share = num_tokens * config.moe_router_topk / config.num_experts
    return min(math.ceil(share * config.moe_expert_capacity_factor), num_tokens)


@torch.no_grad()
def kept_choices(
    indices: torch.Tensor, weights: torch.Tensor, positions: torch.Tensor, num_experts: int, capacity: int, policy: str
) -> torch.Tensor:
    """Return which choices an expert of limited capacity keeps: those with the largest weights, or the first positions.

    Shapes: ``indices, weights: [n, k]``, ``positions: [n]`` all distinct ``-> [n, k]`` bool.
    """
    experts = indices.reshape(-1)
    first = positions.repeat_interleave(indices.shape[1])
    order = first.argsort()
    if policy == "probs":
        order = order[weights.reshape(-1)[order].argsort(descending=True, stable=True)]
    else:
        assert policy == "position", policy
    order = order[experts[order].argsort(stable=True)]
    counts = occurrences(experts, num_experts)
    starts = counts.cumsum(0) - counts
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=order.device) - starts[experts[order]]
    return (rank < capacity).view_as(indices)


def occurrences(numbers: torch.Tensor, count: int) -> torch.Tensor:
    """Count each number below ``count``; unlike ``torch.bincount`` this does not synchronize with the device.

    Shapes: ``numbers: [n]`` int64, all of them below ``count -> [count]`` int64.
    """
    return numbers.new_zeros(count).scatter_add_(0, numbers, torch.ones_like(numbers))
