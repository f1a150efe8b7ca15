"""Token dispatchers: permute tokens, send them to the ranks of their experts, and combine the experts' outputs.

A token has one choice per expert, or one choice per expert and rank if experts are sharded over ranks. Choices are
sorted by destination, so that the rows of one rank are contiguous.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.collectives import (
    all_gather_first_dim,
    all_to_all_first_dim,
    all_to_all_rows,
    reduce_scatter_first_dim,
)
from megatron.core.ops import RowCounts
from megatron.core.parallel_state import ExpertGroups
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.expert_router import Routing


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, sources: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slots)
        return x.index_select(0, sources)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (slots,) = ctx.saved_tensors
        return _rows_at(grad, slots).sum(dim=1), None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor,
        choices: torch.Tensor,
        group: Group | None,
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, slots, choices)
        ctx.group = group
        total = _weighted_sum(rows, weights, slots)
        if group is not None:
            total = reduce_scatter_first_dim(total, group)
        return total.to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None, None]:
        rows, weights, slots, choices = ctx.saved_tensors
        if ctx.group is not None:
            grad = all_gather_first_dim(grad.contiguous(), ctx.group)
        weights_grad = _products_of_rows(rows, grad, slots, weights.dtype)
        of_row = weights.reshape(-1)[choices]
        rows_grad = grad.index_select(0, choices.div(slots.shape[1], rounding_mode="floor")).mul_(of_row.unsqueeze(-1))
        return rows_grad, weights_grad, None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        group: Group,
        meanwhile: Callable[[], None] | None,
    ) -> torch.Tensor:
        ctx.splits, ctx.group = (sent, received), group
        output, work = all_to_all_rows(rows, sent, received, group, async_op=meanwhile is not None)
        if meanwhile is not None:
            meanwhile()
        if work is not None:
            work.wait()
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received = ctx.splits
        return all_to_all_rows(grad.contiguous(), received, sent, ctx.group)[0], None, None, None, None


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return all_gather_first_dim(rows, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(ctx.tp.size)[ctx.tp.rank].contiguous(), None


def _rows_at(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the rows of each token; a slot after the last row yields zeros.

    Shapes: ``rows: [m, h]``, ``slots: [n, c] -> [n, c, h]``.
    """
    rows = _with_row_of_zeros(rows, slots)
    return rows.index_select(0, slots.reshape(-1)).view(*slots.shape, rows.shape[-1])


def _with_row_of_zeros(rows: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Append a row of zeros if there are more slots than rows."""
    return F.pad(rows, (0, 0, 0, 1)) if len(rows) < slots.numel() else rows


def _weighted_sum(rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's rows in the dtype of the weights, which may be wider.

    Wider sums process one choice at a time, so that only one row per token is converted.

    Shapes: ``rows: [m, h]``, ``weights, slots: [n, c] -> [n, h]``.
    """
    if weights.dtype == rows.dtype:
        return torch.bmm(weights.unsqueeze(1), _rows_at(rows, slots)).squeeze(1)
    rows = _with_row_of_zeros(rows, slots)
    total = weights.new_zeros(len(slots), rows.shape[1])
    for places, of_choice in zip(slots.unbind(1), weights.unbind(1)):
        total.addcmul_(rows.index_select(0, places), of_choice.unsqueeze(1))
    return total


def _products_of_rows(rows: torch.Tensor, grad: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the dot products of a token's rows with the token's gradient, in a dtype that may be wider.

    Shapes: ``rows: [m, h]``, ``grad: [n, h]``, ``slots: [n, c] -> [n, c]``.
    """
    if dtype == rows.dtype:
        return torch.bmm(_rows_at(rows, slots), grad.unsqueeze(-1)).squeeze(-1)
    rows, wide = _with_row_of_zeros(rows, slots), grad.to(dtype)
    products = [(wide * rows.index_select(0, places)).sum(dim=1) for places in slots.unbind(1)]
    return torch.stack(products, dim=1)


def take_rows(x: torch.Tensor, choices: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return a row of ``x`` for each choice; ``slots`` has each token's result rows, ``m`` for dropped choices.

    Shapes: ``x: [n, h]``, ``choices: [m]`` indices into the flattened ``slots: [n, c]`` ``-> [m, h]``.
    """
    sources = choices.div(slots.shape[1], rounding_mode="floor")
    result: torch.Tensor = _TakeRows.apply(x, sources, slots)  # type: ignore[no-untyped-call]
    return result


def combine(
    rows: torch.Tensor,
    weights: torch.Tensor,
    choices: torch.Tensor,
    slots: torch.Tensor,
    group: Group | None = None,
) -> torch.Tensor:
    """Return the weighted sum of each token's rows in their dtype: the inverse of `take_rows`.

    The sum is computed in the dtype of the weights. If the ranks of a ``group`` have partial sums, a reduce-scatter
    adds them, and each rank gets its own tokens. Backward: an all-gather in the rows' dtype.

    Shapes: ``rows: [m, h]``, ``weights, slots: [n, c]``, ``choices: [m] -> [n, h]``, with a group ``[n/size, h]``.
    """
    if group is not None and group.size == 1:
        group = None
    result: torch.Tensor = _Combine.apply(rows, weights, slots, choices, group)  # type: ignore[no-untyped-call]
    return result


def reorder(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Permute rows; ``inverse`` is the inverse permutation of ``order``.

    Shapes: ``rows: [m, h]``, ``order, inverse: [m] -> [m, h]``.
    """
    result: torch.Tensor = _TakeRows.apply(rows, order, inverse.unsqueeze(1))  # type: ignore[no-untyped-call]
    return result


def all_to_all(
    rows: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: Group,
    meanwhile: Callable[[], None] | None = None,
) -> torch.Tensor:
    """Send each rank of the group its rows, and return the received rows in group order.

    ``meanwhile`` is called while the all-to-all runs. Backward: the all-to-all in the other direction.

    Shapes: ``[sum(sent), h] -> [sum(received), h]``.
    """
    result: torch.Tensor = _AllToAll.apply(rows, tuple(sent), tuple(received), group, meanwhile)  # type: ignore[no-untyped-call]
    return result


def gather_copies(rows: torch.Tensor, tp: Group) -> torch.Tensor:
    """All-gather rows that every TP rank then uses identically.

    The backward pass takes this rank's slice of the gradient, without communication.

    Shapes: ``[n, h] -> [n * tp, h]``.
    """
    result: torch.Tensor = _GatherCopies.apply(rows, tp)  # type: ignore[no-untyped-call]
    return result


Experts = Callable[[torch.Tensor, RowCounts], torch.Tensor]
"""Function that applies the experts to rows sorted by expert, given the number of rows of each expert of this rank."""
Meanwhile = Callable[[], None]


class TokenDispatcher(ABC):
    """Send tokens to their experts and combine the results.

    Choices with an index of ``num_experts`` or more are dropped. ``meanwhile`` is called once, during communication if
    there is any.
    """

    def __init__(self, num_experts: int, groups: ExpertGroups) -> None:
        self.num_local, self.groups = num_experts // groups.size, groups

    @abstractmethod
    def __call__(self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        Shapes: ``[n, h] -> [n, h]``.
        """


class AllToAllDispatcher(TokenDispatcher):
    """Send each token only to the ranks of its experts, with an all-to-all of variable sizes."""

    def __call__(self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        group, copies, num_local = self.groups.model, self.groups.tensor_size, self.num_local
        # Order of destinations: the experts of one rank, repeated for each rank that holds a shard of them.
        indices = routing.indices
        first = indices.div(num_local, rounding_mode="floor") * (copies * num_local) + indices % num_local
        targets = first.unsqueeze(-1) + num_local * torch.arange(copies, device=x.device)
        ordered = sort_choices(targets.flatten(1), group.size * num_local)
        by_rank = ordered.counts.view(group.size, num_local)
        coming = all_to_all_first_dim(by_rank, group)
        # The only synchronization of a layer: the host needs the counts to allocate memory.
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
    """All-gather all tokens; each rank runs its own experts, and a reduce-scatter sums the results."""

    def __call__(self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts."""
        meanwhile()
        group = self.groups.model
        x, weights = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (x, routing.weights))
        targets = gather_from_sequence_parallel_region(routing.indices, group=group) - self.groups.rank * self.num_local
        targets = targets.masked_fill((targets < 0) | (targets >= self.num_local), self.num_local)
        ordered = sort_choices(targets, self.num_local)
        counts = RowCounts(ordered.counts.tolist(), ordered.counts)
        group.ensure_not_given_up()
        choices, slots = ordered.kept(sum(counts))
        rows = experts(take_rows(x, choices, slots), counts)
        return combine(rows, weights, choices, slots, group)


@dataclass(frozen=True, eq=False)
class OrderedChoices:
    """Choices sorted by target, each choice's position in this order, and the number of choices per target.

    Choices with an index of ``num_targets`` or more come last and are not counted.

    Shapes: ``order: [n * c]``, ``places: [n, c]``, ``counts: [num_targets]``.
    """

    order: torch.Tensor
    places: torch.Tensor
    counts: torch.Tensor

    def kept(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the ``number`` choices that have targets, and all positions, with ``number`` for dropped choices.

        Shapes: ``-> [number]``, ``[n, c]``.
        """
        return self.order[:number], self.places.clamp(max=number)


def sort_choices(targets: torch.Tensor, num_targets: int) -> OrderedChoices:
    """Sort choices by target without synchronizing with the device.

    Shapes: ``targets: [n, c]``.
    """
    in_order, order = targets.reshape(-1).sort(stable=True)
    numbers = torch.arange(max(len(order), num_targets), device=order.device)
    places = torch.empty_like(order)
    places[order] = numbers[: len(order)]
    ends = torch.searchsorted(in_order, numbers[:num_targets], right=True)
    return OrderedChoices(order, places.view_as(targets), ends.diff(prepend=ends.new_zeros(1)))
