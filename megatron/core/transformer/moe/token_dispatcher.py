"""The dispatch: tokens travel to the ranks of their experts, and what these make of them comes back.

A token has one choice for each of its experts, or several where experts are cut over ranks: one a rank. Choices are
sorted by where they go, so that a rank's rows lie together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable

import torch

from megatron.core.collectives import all_to_all_first_dim
from megatron.core.tensor_parallel.mappings import (
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.moe.exchange import all_to_all, combine, reorder, take_rows
from megatron.core.transformer.moe.expert_groups import ExpertGroups
from megatron.core.transformer.moe.router import Routing

Experts = Callable[[torch.Tensor, list[int]], torch.Tensor]
"""Return what experts make of rows in their order, given how many rows each of this rank's has."""
Meanwhile = Callable[[], None]


class TokenDispatcher(ABC):
    """Bring tokens to their experts and back.

    Choices of an expert beyond the last are dropped. ``meanwhile`` is called once, while tokens travel where they do.
    """

    def __init__(self, num_experts: int, groups: ExpertGroups) -> None:
        self.num_local, self.groups = num_experts // groups.size, groups

    @abstractmethod
    def __call__(self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile) -> torch.Tensor:
        """Return the weighted sum of what each token's experts make of it.

        Shapes: ``[n, h] -> [n, h]``.
        """


class AllToAllDispatcher(TokenDispatcher):
    """Send each token to its experts' ranks only; rank by rank as many rows as go there."""

    def __call__(self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile) -> torch.Tensor:
        """Return the weighted sum of what each token's experts make of it."""
        group, copies, num_local = self.groups.model, self.groups.tensor_size, self.num_local
        # By destination: experts of one rank, then as often again as ranks cut them.
        indices = routing.indices
        first = indices.div(num_local, rounding_mode="floor") * (copies * num_local) + indices % num_local
        targets = first.unsqueeze(-1) + num_local * torch.arange(copies, device=x.device)
        choices, slots, counts = sorted_choices(targets.flatten(1), group.size * num_local)
        rows = take_rows(x, choices, slots)
        if group.size == 1:
            meanwhile()
            rows = experts(rows, counts.tolist())
        else:
            by_rank = counts.view(group.size, num_local)
            coming = all_to_all_first_dim(by_rank, group)
            sent, received = by_rank.sum(dim=1).tolist(), coming.sum(dim=1).tolist()
            rows = all_to_all(rows, sent, received, group, meanwhile)
            of_expert = torch.arange(num_local, device=x.device).repeat(group.size)
            order = of_expert.repeat_interleave(coming.view(-1)).argsort(stable=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=x.device)
            rows = experts(reorder(rows, order, inverse), coming.sum(dim=0).tolist())
            rows = all_to_all(reorder(rows, inverse, order), received, sent, group)
        weights = routing.weights.repeat_interleave(copies, dim=1) if copies > 1 else routing.weights
        return combine(rows, weights, choices, slots)


class AllGatherDispatcher(TokenDispatcher):
    """Gather all tokens on every rank, which takes those of its experts, and sum the results."""

    def __call__(self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile) -> torch.Tensor:
        """Return the weighted sum of what each token's experts make of it."""
        meanwhile()
        group = self.groups.model
        x, weights = (gather_from_sequence_parallel_region(tensor, group) for tensor in (x, routing.weights))
        targets = gather_from_sequence_parallel_region(routing.indices, group) - self.groups.rank * self.num_local
        targets = targets.masked_fill((targets < 0) | (targets >= self.num_local), self.num_local)
        choices, slots, counts = sorted_choices(targets, self.num_local)
        rows = experts(take_rows(x, choices, slots), counts.tolist())
        return reduce_scatter_to_sequence_parallel_region(combine(rows, weights, choices, slots), group)


def sorted_choices(targets: torch.Tensor, num_targets: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the choices in the order of their targets, where each token's are among them, and how many a target has.

    Choices of a target beyond the last are left out; their place is the one behind all others.

    Shapes: ``targets: [n, c] -> [m], [n, c], [num_targets]``.
    """
    flat = targets.reshape(-1)
    counts = flat.clamp(max=num_targets).bincount(minlength=num_targets + 1)
    order = flat.argsort(stable=True)
    slots = torch.empty_like(order)
    slots[order] = torch.arange(len(order), device=order.device)
    num_kept = len(order) - int(counts[num_targets])
    return order[:num_kept], slots.clamp(max=num_kept).view_as(targets), counts[:num_targets]
