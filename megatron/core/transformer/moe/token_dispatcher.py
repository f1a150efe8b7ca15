"""The dispatch: tokens travel to the ranks of their experts, and what these make of them comes back.

A token has one choice for each of its experts, or several where experts are cut over ranks: one a rank. Choices are
sorted by where they go, so that a rank's rows lie together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.core.collectives import all_to_all_first_dim
from megatron.core.kernels.matrix_product import RowCounts
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.exchange import all_to_all, combine, reorder, take_rows
from megatron.core.transformer.moe.expert_groups import ExpertGroups
from megatron.core.transformer.moe.router import Routing

Experts = Callable[[torch.Tensor, RowCounts], torch.Tensor]
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
        ordered = sort_choices(targets.flatten(1), group.size * num_local)
        by_rank = ordered.counts.view(group.size, num_local)
        coming = all_to_all_first_dim(by_rank, group)
        # The one wait of a layer: how much memory what comes needs is for the host to know.
        going, arriving = torch.stack((by_rank, coming)).tolist()
        group.ensure_not_given_up()
        sent, received = ([sum(of_rank) for of_rank in counts] for counts in (going, arriving))
        of_experts = RowCounts((sum(of_expert) for of_expert in zip(*arriving)), coming.sum(0))
        choices, slots = ordered.kept(sum(sent))
        rows = take_rows(x, choices, slots)
        if group.size == 1:
            meanwhile()
            rows = experts(rows, of_experts)
        else:
            rows = all_to_all(rows, sent, received, group, meanwhile)
            of_expert = torch.arange(num_local, device=x.device).repeat(group.size)
            order = of_expert.repeat_interleave(coming.view(-1), output_size=len(rows)).argsort(stable=True)
            inverse = torch.empty_like(order)
            inverse[order] = torch.arange(len(order), device=x.device)
            rows = experts(reorder(rows, order, inverse), of_experts)
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
        ordered = sort_choices(targets, self.num_local)
        counts = RowCounts(ordered.counts.tolist(), ordered.counts)
        group.ensure_not_given_up()
        choices, slots = ordered.kept(sum(counts))
        rows = experts(take_rows(x, choices, slots), counts)
        return combine(rows, weights, choices, slots, group)


@dataclass(frozen=True, eq=False)
class OrderedChoices:
    """Hold the choices in the order of their targets, each choice's place there, and how many a target has.

    Those of a target beyond the last are behind all others, and in no count.

    Shapes: ``order: [n * c]``, ``places: [n, c]``, ``counts: [num_targets]``.
    """

    order: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor

    def kept(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the choices that have targets, given how many, and all places; those of the others are behind them.

        Shapes: ``-> [number]``, ``[n, c]``.
        """
        return self.order[:number], self.places.clamp(max=number)


def sort_choices(targets: torch.Tensor, num_targets: int) -> OrderedChoices:
    """Sort choices by their targets; the host waits for nothing.

    Shapes: ``targets: [n, c]``.
    """
    in_order, order = targets.reshape(-1).sort(stable=True)
    numbers = torch.arange(max(len(order), num_targets), device=order.device)
    places = torch.empty_like(order)
    places[order] = numbers[: len(order)]
    ends = torch.searchsorted(in_order, numbers[:num_targets], right=True)
    return OrderedChoices(order, places.view_as(targets), ends.diff(prepend=ends.new_zeros(1)))
