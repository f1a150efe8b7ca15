"""Expert load: token counts per expert, the expert bias, the auxiliary load-balancing losses and the router's z-loss.

Fedus et al. 2021, https://arxiv.org/abs/2101.03961; Qiu et al. 2025, https://arxiv.org/abs/2501.11873; Zoph et al.
2022, https://arxiv.org/abs/2202.08906.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megatron.core.collectives import all_reduce
from megatron.core.layer_output import AuxiliaryLoss
from megatron.core.parallel_state import ExpertGroups, ParallelState
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import INDEPENDENT_SCORES, MoEConfig
from megatron.core.transformer.moe.routing import TokenRows, expert_scores, occurrences


class ExpertTokenCounts:
    """Number of tokens routed to each expert of one layer in one step on this rank, and number of dropped choices.

    Forward passes of recomputation are not counted.

    Shapes: ``counts: [experts + 1]`` float64, dropped choices last.
    """

    def __init__(self) -> None:
        self.counts: torch.Tensor | None = None
        self._so_far: torch.Tensor | None = None
        self._num_microbatches = 0

    def begin_step(self) -> None:
        """Reset the counts."""
        self.counts = self._so_far = None
        self._num_microbatches = 0

    @torch.no_grad()
    def add(self, indices: torch.Tensor, num_experts: int, local_padding_mask: torch.Tensor | None = None) -> None:
        """Count the choices of a micro-batch; the index ``num_experts`` stands for a dropped choice.

        Padding has no choices and does not count as dropped.

        Shapes: ``indices: [n, k]``, ``local_padding_mask: [n]``.
        """
        if torch._C._current_graph_task_id() != -1:
            return  # Inside a backward pass: recomputation of a forward pass that was already counted.
        if local_padding_mask is not None:
            indices = indices.masked_fill(local_padding_mask.unsqueeze(1), num_experts + 1)
        found = occurrences(indices.reshape(-1), num_experts + 2)[:-1].double()
        self.counts = found if self.counts is None else self.counts + found

    @torch.no_grad()
    def add_to_global_batch(self, counts: torch.Tensor, dp: Group) -> torch.Tensor:
        """Add a micro-batch's counts of all data-parallel ranks, and return the mean over micro-batches so far.

        Collective over ``dp``.

        Shapes: ``[experts] -> [experts]``.
        """
        total = counts.clone()
        all_reduce(total, dp)
        self._num_microbatches += 1
        self._so_far = total if self._so_far is None else self._so_far + total
        return self._so_far / self._num_microbatches


@dataclass(frozen=True)
class LoadReport:
    """Expert load of one step: each expert's load relative to the mean load of its layer, and the dropped choices.

    ``layers`` are the numbers of the MoE layers, from 0. ``dropped`` is the dropped fraction of all choices.
    """

    layers: tuple[int, ...]
    shares: tuple[tuple[float, ...], ...]
    dropped: float

    def by_layer(self) -> dict[str, list[float]]:
        """Return the relative loads of each layer, keyed by layer number from 1."""
        return {str(layer + 1): list(shares) for layer, shares in zip(self.layers, self.shares)}

    def scalars(self) -> dict[str, float | None]:
        """Return each expert's relative load by its TensorBoard tag."""
        return {
            f"expert-load/layer-{layer + 1}/expert-{expert}": share
            for layer, shares in zip(self.layers, self.shares)
            for expert, share in enumerate(shares)
        }

    def numbers(self) -> dict[str, float]:
        """Return the summary metrics by name."""
        flat = [share for shares in self.shares for share in shares]
        return {
            "expert_load_max": max(flat, default=0.0),
            "expert_load_min": min(flat, default=0.0),
            "dropped_tokens": self.dropped,
        }


class ExpertLoads:
    """Sum the token counts of all MoE layers over all ranks, and update the expert biases.

    ``routers`` are this rank's routers by layer number. ``layers`` are the numbers of all MoE layers.
    """

    def __init__(
        self, routers: dict[int, BiasedRouter], layers: Sequence[int], config: MoEConfig, state: ParallelState
    ) -> None:
        self._routers, self._layers, self._config, self._state = routers, tuple(layers), config, state

    def begin_step(self) -> None:
        """Reset the counts of all routers."""
        for router in self._routers.values():
            router.tally.begin_step()

    def collect(self, device: torch.device) -> torch.Tensor:
        """Return the token counts of each layer, summed over all ranks; collective.

        Shapes: ``-> [layers, experts + 1]`` float64.
        """
        assert self._config.num_experts is not None
        total = torch.zeros(len(self._layers), self._config.num_experts + 1, dtype=torch.float64, device=device)
        for row, layer in zip(total, self._layers):
            router = self._routers.get(layer)
            if router is not None and router.tally.counts is not None:
                row.copy_(router.tally.counts)
        all_reduce(total, self._state.world)
        return total

    @torch.no_grad()
    def move_biases(self, totals: torch.Tensor) -> None:
        """Increase the bias of experts below the mean load, and decrease it for experts above.

        Shapes: ``totals: [layers, experts + 1]``.
        """
        for row, layer in zip(totals, self._layers):
            router = self._routers.get(layer)
            if router is not None and router.expert_bias is not None:
                given = row[:-1]
                step = (given.mean() - given).sign() * self._config.moe_router_bias_update_rate
                router.expert_bias.add_(step.to(router.expert_bias.dtype))

    def report(self, totals: torch.Tensor) -> LoadReport:
        """Copy a step's load to the host.

        Shapes: ``totals: [layers, experts + 1]``.
        """
        given = totals[:, :-1]
        shares = given / given.mean(dim=1, keepdim=True).clamp(min=1e-9)
        dropped = totals[:, -1].sum() / totals.sum().clamp(min=1.0)
        # One copy, because each copy to the host synchronizes with the device.
        *flat, share_dropped = torch.cat((shares.flatten(), dropped.view(1))).tolist()
        rows = (flat[first : first + given.shape[1]] for first in range(0, len(flat), given.shape[1]))
        return LoadReport(self._layers, tuple(map(tuple, rows)), share_dropped)


class BiasedRouter(nn.Module):
    """Interface of a router whose load is counted: token counts and an optional expert bias."""

    tally: ExpertTokenCounts
    expert_bias: nn.Parameter | None


LOSS_NAMES = {
    "aux_loss": "load_balancing_loss",
    "seq_aux_loss": "seq_load_balancing_loss",
    "global_aux_loss": "global_load_balancing_loss",
}
"""Log name of each --moe-router-load-balancing-type."""
Z_LOSS = "z_loss"


def auxiliary_loss_names(config: MoEConfig) -> tuple[str, ...]:
    """Return the names of the auxiliary losses of MoE layers."""
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
    tally: ExpertTokenCounts,
) -> tuple[AuxiliaryLoss, ...]:
    """Return the auxiliary losses of a micro-batch, whose tokens are spread over several ranks.

    The losses count the top-k choices by score, before capacity and expert bias apply. Padding is excluded from sums
    and token counts.

    Shapes: ``logits: [n, experts]``, ``local_padding_mask: [n]``.
    """
    lengths = None
    num_tokens: int | torch.Tensor = rows.num_tokens
    if rows.padding_mask is not None:
        lengths = rows.padding_mask.logical_not().sum(dim=1).to(logits.dtype)
        # Each context-parallel rank counts an equal part, independent of the padding in its own part of the sequences.
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
    tally: ExpertTokenCounts,
) -> Iterator[AuxiliaryLoss]:
    topk, num_experts = config.moe_router_topk, logits.shape[1]
    scores, chosen = counted_scores(logits, topk, config.moe_router_score_function)
    if local_padding_mask is not None:
        scores, chosen = (each.masked_fill(local_padding_mask.unsqueeze(1), 0.0) for each in (scores, chosen))
    # Per sequence; the micro-batch's totals are the sums over its sequences.
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
            loss_sum = mean_product(sums, counts, length, length * cp_size, topk, num_experts) / batch_size * num_tokens
        elif kind == "seq_aux_loss":
            assert lengths is not None
            of_sequences = (
                mean_product(of_scores, of_choices, length / cp_size, length, topk, num_experts) * length / cp_size
                for of_scores, of_choices, length in zip(sums, counts, lengths.clamp(min=1.0))
            )
            loss_sum = torch.stack(list(of_sequences)).sum()
        elif kind == "aux_loss":
            whole = num_tokens * cp_size
            loss_sum = (
                mean_product(sums.sum(dim=0), counts.sum(dim=0), num_tokens, whole, topk, num_experts) * num_tokens
            )
        else:
            assert kind == "global_aux_loss", kind
            so_far = tally.add_to_global_batch(counts.sum(dim=0), groups.dp)
            whole = num_tokens * cp_size * groups.dp.size
            if lengths is not None:
                whole = so_far.sum() / config.moe_router_topk
            loss_sum = mean_product(sums.sum(dim=0), so_far, num_tokens, whole, topk, num_experts) * num_tokens
        yield _loss(LOSS_NAMES[kind], loss_sum, num_tokens, coefficient)


def counted_scores(logits: torch.Tensor, topk: int, score_function: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the scores that a balancing loss counts, which sum to 1 per token, and 1 for each of the top-k choices.

    Shapes: ``[n, experts] -> [n, experts]``, twice.
    """
    scores = expert_scores(logits, score_function)
    if score_function in INDEPENDENT_SCORES:
        scores = scores / (scores.sum(dim=-1, keepdim=True) + 1e-20)
    return scores, torch.zeros_like(scores).scatter_(1, scores.detach().topk(topk, dim=1).indices, 1.0)


def mean_product(
    sums: torch.Tensor,
    counts: torch.Tensor,
    num_scores: int | torch.Tensor,
    num_counted: int | torch.Tensor,
    topk: int,
    num_experts: int,
) -> torch.Tensor:
    """Return the number of experts x the sum over experts of mean score x fraction of choices; 1 for balanced load.

    ``sums`` are over ``num_scores`` tokens, and ``counts`` over ``num_counted``.

    Shapes: ``sums, counts: [..., experts] -> []``.
    """
    divisor = topk * num_scores * num_counted
    if isinstance(divisor, torch.Tensor):
        # A micro-batch may consist of padding only; its sums are 0.
        divisor = divisor.masked_fill(divisor == 0.0, 1.0)
    return (sums * counts).sum() * (num_experts / divisor)


def _over_tp(total: torch.Tensor, groups: ExpertGroups) -> torch.Tensor:
    """Sum over the ranks that share a micro-batch; each rank gets the gradient of its own tokens."""
    return reduce_from_tensor_model_parallel_region(total, groups.tp)


def _loss(name: str, loss_sum: torch.Tensor, num_tokens: int | torch.Tensor, coefficient: float) -> AuxiliaryLoss:
    if not isinstance(num_tokens, torch.Tensor):
        num_tokens = loss_sum.detach().new_full((), num_tokens)
    return AuxiliaryLoss(name, loss_sum, num_tokens, coefficient)
