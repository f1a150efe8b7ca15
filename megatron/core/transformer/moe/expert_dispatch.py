"""Token dispatchers: permute tokens, send them to the ranks of their experts, and combine the experts' outputs.

A token has one choice per expert, or one choice per expert and rank if experts are sharded over ranks. Choices are
sorted by destination, so that the rows of one rank are contiguous. No row is copied twice: a gather writes the rows in
their order, and the weighted sum reads them (`megatron.core.ops.gather_rows`, `combine_rows`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F

from megatron.core.collectives import (
    all_gather_first_dim,
    all_to_all_first_dim,
    all_to_all_rows,
    reduce_scatter_first_dim,
)
from megatron.core.ops import (
    Groups,
    RowCounts,
    RowEnds,
    RowOrder,
    combine_gradients,
    combine_rows,
    gather_rows,
    sum_rows,
)
from megatron.core.parallel_state import ExpertGroups
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.moe.expert_router import Routing

LateGradients = list[Callable[[], None]]
"""Weight gradients of one forward pass's experts that the backward pass computes during its next all-to-all."""


class _TakeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, order: RowOrder) -> torch.Tensor:
        ctx.save_for_backward(order.choices, order.slots)
        ctx.flags = order.has_empty_rows, order.has_dropped_choices
        return gather_rows(x, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return sum_rows(grad, RowOrder(*ctx.saved_tensors, *ctx.flags)), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, order: RowOrder, group: Group | None
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, order.choices, order.slots)
        ctx.flags, ctx.group = (order.has_empty_rows, order.has_dropped_choices), group
        if group is None:
            return combine_rows(rows, weights, order, rows.dtype)
        total = combine_rows(rows, weights, order, weights.dtype)
        return reduce_scatter_first_dim(total, group).to(rows.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        rows, weights, *order = ctx.saved_tensors
        if ctx.group is not None:
            grad = all_gather_first_dim(grad.contiguous(), ctx.group)
        return *combine_gradients(grad, rows, weights, RowOrder(*order, *ctx.flags)), None, None


class _Reorder(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(inverse)
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (inverse,) = ctx.saved_tensors
        return grad.index_select(0, inverse), None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: torch.Tensor,
        sent: tuple[int, ...],
        received: tuple[int, ...],
        group: Group,
        meanwhile: Callable[[], None] | None,
        late: LateGradients | None,
    ) -> torch.Tensor:
        ctx.splits, ctx.group, ctx.late = (sent, received), group, late
        output, work = all_to_all_rows(rows, sent, received, group, async_op=meanwhile is not None)
        if meanwhile is not None:
            meanwhile()
        if work is not None:
            work.wait()
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        sent, received = ctx.splits
        rows_grad, work = all_to_all_rows(grad.contiguous(), received, sent, ctx.group, async_op=bool(ctx.late))
        while ctx.late:
            ctx.late.pop(0)()
        if work is not None:
            work.wait()
        return rows_grad, *(None,) * 5


class _GatherCopies(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, tp: Group) -> torch.Tensor:
        ctx.tp = tp
        return all_gather_first_dim(rows, tp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad.chunk(ctx.tp.size)[ctx.tp.rank].contiguous(), None


def take_rows(x: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Return the row of ``x`` of each row's choice, and zeros for a row without a choice.

    Shapes: ``x: [n, h] -> [m, h]``.
    """
    result: torch.Tensor = _TakeRows.apply(x, order)  # type: ignore[no-untyped-call]
    return result


def combine(rows: torch.Tensor, weights: torch.Tensor, order: RowOrder, group: Group | None = None) -> torch.Tensor:
    """Return the weighted sum of each token's rows in their dtype: the inverse of `take_rows`.

    The sum is computed in the dtype of the weights, or a wider one. If the ranks of a ``group`` have partial sums, a
    reduce-scatter adds them, and each rank gets its own tokens. Backward: an all-gather in the rows' dtype.

    Shapes: ``rows: [m, h]``, ``weights: [n, c] -> [n, h]``, with a group ``[n/size, h]``.
    """
    if group is not None and group.size == 1:
        group = None
    result: torch.Tensor = _Combine.apply(rows, weights, order, group)  # type: ignore[no-untyped-call]
    return result


def reorder(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Permute rows; ``inverse`` is the inverse permutation of ``order``.

    Shapes: ``rows: [m, h]``, ``order, inverse: [m] -> [m, h]``.
    """
    result: torch.Tensor = _Reorder.apply(rows, order, inverse)  # type: ignore[no-untyped-call]
    return result


def all_to_all(
    rows: torch.Tensor,
    sent: Sequence[int],
    received: Sequence[int],
    group: Group,
    meanwhile: Callable[[], None] | None = None,
    late: LateGradients | None = None,
) -> torch.Tensor:
    """Send each rank of the group its rows, and return the received rows in group order.

    ``meanwhile`` is called while the all-to-all runs. Backward: the all-to-all in the other direction, and meanwhile
    the weight gradients that were deferred to ``late``.

    Shapes: ``[sum(sent), h] -> [sum(received), h]``.
    """
    arguments = rows, tuple(sent), tuple(received), group, meanwhile, late
    result: torch.Tensor = _AllToAll.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def gather_copies(rows: torch.Tensor, tp: Group) -> torch.Tensor:
    """All-gather rows that every TP rank then uses identically.

    The backward pass takes this rank's slice of the gradient, without communication.

    Shapes: ``[n, h] -> [n * tp, h]``.
    """
    result: torch.Tensor = _GatherCopies.apply(rows, tp)  # type: ignore[no-untyped-call]
    return result


class Experts(Protocol):
    """Function that applies the experts to rows, given the number of rows of each expert of this rank.

    Rows are sorted by expert if they are read in the ``order``; ``order`` and ``weights`` as in `run_in_order`.
    """

    def __call__(
        self, x: torch.Tensor, counts: Groups, order: RowOrder | None = None, weights: torch.Tensor | None = None, /
    ) -> torch.Tensor:
        """Return the outputs."""


Meanwhile = Callable[[], None]


def run_in_order(
    run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, order: RowOrder | None, weights: torch.Tensor | None
) -> torch.Tensor:
    """Apply ``run`` to the rows of ``x`` in an order, and return the weighted sum of each token's results.

    Without ``weights`` the order is a permutation, which is undone. Without an ``order`` the rows stay in theirs.

    Shapes: ``x: [n, h]``, ``weights: [n, c] -> [n, h]``.
    """
    if order is None:
        return run(x)
    if weights is not None:
        return combine(run(take_rows(x, order)), weights, order)
    slots = order.slots.flatten()
    return reorder(run(reorder(x, order.choices, slots)), slots, order.choices)


class TokenDispatcher(ABC):
    """Send tokens to their experts and combine the results.

    Choices with an index of ``num_experts`` or more are dropped. ``meanwhile`` is called once, during communication if
    there is any.
    """

    def __init__(self, num_experts: int, groups: ExpertGroups) -> None:
        self.num_local, self.groups = num_experts // groups.size, groups

    def __call__(
        self,
        x: torch.Tensor,
        routing: Routing,
        experts: Experts,
        meanwhile: Meanwhile,
        *,
        capacity: int | None = None,
        takes_row_ends: bool = False,
        late: LateGradients | None = None,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts.

        The host waits for the device to read the numbers of rows, except in two cases. With a ``capacity``, each rank
        sends exactly so many rows to each expert, of which those without a token are zeros. Experts must not be sharded
        over ranks then. If all experts are on this rank and ``takes_row_ends``, the experts get `RowEnds`.

        The experts may defer weight gradients to ``late`` if `exchanges_rows`.

        Shapes: ``[n, h] -> [n, h]``.
        """
        if capacity is not None:
            return self._padded(x, routing, experts, meanwhile, capacity, late)
        if self.groups.model.size == 1:
            return self._local(x, routing, experts, meanwhile, takes_row_ends)
        return self._exchanged(x, routing, experts, meanwhile, late)

    @property
    def exchanges_rows(self) -> bool:
        """Return whether an all-to-all sends rows; weight gradients can then run during the backward all-to-all."""
        return False

    @property
    def sends_padding(self) -> bool:
        """Return whether ranks can send the same number of rows to each expert, so that no number depends on data."""
        return self.exchanges_rows

    @abstractmethod
    def _exchanged(
        self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile, late: LateGradients | None
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, which are on several ranks."""

    def _local(
        self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile, takes_row_ends: bool
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, which are all on this rank."""
        meanwhile()
        ordered = sort_choices(routing.indices, self.num_local)
        if takes_row_ends:
            order, counts = ordered.row_order(may_drop=routing.may_drop), ordered.row_ends()
            return experts(x, counts, order, routing.weights)
        of_experts = ordered.counts()
        read = RowCounts(of_experts.tolist(), of_experts)
        self.groups.model.ensure_not_given_up()
        return experts(x, read, ordered.row_order(sum(read)), routing.weights)

    def _padded(
        self,
        x: torch.Tensor,
        routing: Routing,
        experts: Experts,
        meanwhile: Meanwhile,
        capacity: int,
        late: LateGradients | None,
    ) -> torch.Tensor:
        """Return the weighted sum of the outputs of each token's experts, with ``capacity`` rows per rank and expert.

        No number of rows depends on the data.
        """
        group, num_local = self.groups.model, self.num_local
        assert self.groups.tensor_size == 1, "experts are not sharded over ranks"
        order = sort_choices(routing.indices, group.size * num_local).padded_row_order(capacity)
        counts = RowCounts([group.size * capacity] * num_local, are_equal=True)
        rows = take_rows(x, order)
        if group.size == 1:
            meanwhile()
            return combine(experts(rows, counts), routing.weights, order)
        splits = [num_local * capacity] * group.size
        rows = all_to_all(rows, splits, splits, group, meanwhile, late)
        rows = _exchange_dims(rows, group.size, num_local)
        rows = _exchange_dims(experts(rows, counts), num_local, group.size)
        return combine(all_to_all(rows, splits, splits, group), routing.weights, order)


def _exchange_dims(rows: torch.Tensor, first: int, second: int) -> torch.Tensor:
    """Transpose the first two dims of ``[first, second, ...]``. Shapes: ``[m, h] -> [m, h]``."""
    if 1 in (first, second):
        return rows
    return rows.view(first, second, -1, rows.shape[1]).transpose(0, 1).reshape(-1, rows.shape[1])


def targets_of(routing: Routing, groups: ExpertGroups, num_local: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the destinations of each token and their weights, with one destination per rank and expert on it.

    Destinations are numbered by rank: the experts of one rank, repeated for each rank that holds a shard of them.

    Shapes: ``-> [n, k * tensor_size]`` both.
    """
    targets, weights, copies = routing.indices, routing.weights, groups.tensor_size
    if copies == 1:
        return targets, weights
    first = targets.div(num_local, rounding_mode="floor") * (copies * num_local) + targets % num_local
    targets = (first.unsqueeze(-1) + num_local * torch.arange(copies, device=targets.device)).flatten(1)
    return targets, weights.repeat_interleave(copies, dim=1)


class AllToAllDispatcher(TokenDispatcher):
    """Send each token only to the ranks of its experts, with an all-to-all of variable sizes."""

    @property
    def exchanges_rows(self) -> bool:
        """Whether rows are exchanged."""
        return self.groups.model.size > 1

    def _exchanged(
        self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile, late: LateGradients | None
    ) -> torch.Tensor:
        group, num_local = self.groups.model, self.num_local
        targets, weights = targets_of(routing, self.groups, num_local)
        ordered = sort_choices(targets, group.size * num_local)
        by_rank = ordered.counts().view(group.size, num_local)
        coming = all_to_all_first_dim(by_rank, group)
        # The only synchronization of a layer: the host needs the counts to allocate memory.
        going, arriving = torch.stack((by_rank, coming)).tolist()
        group.ensure_not_given_up()
        sent, received = ([sum(of_rank) for of_rank in counts] for counts in (going, arriving))
        of_experts = RowCounts((sum(of_expert) for of_expert in zip(*arriving)), coming.sum(0))
        order = ordered.row_order(sum(sent))
        rows = all_to_all(take_rows(x, order), sent, received, group, meanwhile, late)
        if num_local == 1:
            rows = experts(rows, of_experts)
        else:
            # Sorting is faster on short integers.
            of_expert = torch.arange(num_local, device=x.device, dtype=torch.int16).repeat(group.size)
            by_expert = of_expert.repeat_interleave(coming.view(-1), output_size=len(rows)).argsort(stable=True)
            inverse = torch.empty_like(by_expert)
            inverse[by_expert] = torch.arange(len(by_expert), device=x.device)
            rows = experts(rows, of_experts, RowOrder(by_expert, inverse.unsqueeze(1)))
        return combine(all_to_all(rows, received, sent, group), weights, order)


class AllGatherDispatcher(TokenDispatcher):
    """All-gather all tokens; each rank runs its own experts, and a reduce-scatter sums the results."""

    def _exchanged(
        self, x: torch.Tensor, routing: Routing, experts: Experts, meanwhile: Meanwhile, late: LateGradients | None
    ) -> torch.Tensor:
        meanwhile()
        group = self.groups.model
        x, weights = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (x, routing.weights))
        targets = gather_from_sequence_parallel_region(routing.indices, group=group) - self.groups.rank * self.num_local
        targets = targets.masked_fill((targets < 0) | (targets >= self.num_local), self.num_local)
        ordered = sort_choices(targets, self.num_local)
        of_experts = ordered.counts()
        counts = RowCounts(of_experts.tolist(), of_experts)
        group.ensure_not_given_up()
        order = ordered.row_order(sum(counts))
        return combine(experts(take_rows(x, order), counts), weights, order, group)


@dataclass(frozen=True, eq=False)
class OrderedChoices:
    """Choices sorted by target, each choice's position in this order, and where the choices of each target end.

    Choices with an index of ``num_targets`` or more are dropped: they come last and are after the last end.

    Shapes: ``targets, places: [n, c]``, ``order: [n * c]``, ``ends: [num_targets]``.
    """

    targets: torch.Tensor
    places: torch.Tensor
    order: torch.Tensor
    ends: torch.Tensor

    def counts(self) -> torch.Tensor:
        """Return the number of choices per target. Shapes: ``-> [num_targets]``."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))

    def row_ends(self) -> RowEnds:
        """Return the ends for grouped GEMMs."""
        return RowEnds(self.ends.to(torch.int32))

    def row_order(self, num_kept: int | None = None, *, may_drop: bool = True) -> RowOrder:
        """Return the order with a row for each choice that has a target.

        The host knows their number, ``num_kept``. If it is None, there is a row for each choice, and rows of dropped
        choices, which exist only if ``may_drop``, are empty and come last.
        """
        count = self.order.numel()
        if num_kept is not None:
            return RowOrder(self.order[:num_kept], self.places, has_dropped_choices=num_kept < count)
        if not may_drop:
            return RowOrder(self.order, self.places)
        choices = self.order.masked_fill(torch.arange(count, device=self.order.device) >= self.ends[-1], count)
        slots = self.places.masked_fill(self.targets >= len(self.ends), count)
        return RowOrder(choices, slots, has_empty_rows=True, has_dropped_choices=True)

    def padded_row_order(self, capacity: int) -> RowOrder:
        """Return the order with ``capacity`` rows per target; no target may have more choices.

        Shapes: of the row order: ``choices: [num_targets * capacity]``.
        """
        counts, count, num_rows = self.counts(), self.order.numel(), len(self.ends) * capacity
        starts, numbers = self.ends - counts, torch.arange(capacity, device=self.order.device)
        of_rows = (starts.unsqueeze(1) + numbers).clamp_(max=count)
        choices = F.pad(self.order, (0, 1), value=count)[of_rows]
        choices = choices.masked_fill_(numbers >= counts.unsqueeze(1), count).flatten()
        # Offset of each target's rows relative to the order without padding.
        moved = torch.arange(0, num_rows, capacity, device=starts.device) - starts
        is_dropped = self.targets >= len(self.ends)
        slots = self.places + moved[self.targets.clamp(max=len(self.ends) - 1)]
        return RowOrder(
            choices, slots.masked_fill_(is_dropped, num_rows), has_empty_rows=True, has_dropped_choices=True
        )


def sort_choices(targets: torch.Tensor, num_targets: int) -> OrderedChoices:
    """Sort choices by target without synchronizing with the device.

    Shapes: ``targets: [n, c]``.
    """
    in_order, order = targets.reshape(-1).sort(stable=True)
    numbers = torch.arange(max(len(order), num_targets), device=order.device)
    places = torch.empty_like(order)
    places[order] = numbers[: len(order)]
    ends = torch.searchsorted(in_order, numbers[:num_targets], right=True)
    return OrderedChoices(targets, places.view_as(targets), order, ends)
