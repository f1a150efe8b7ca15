"""How rows of tokens change places: among a rank's own rows, between ranks, and back into tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.collectives import all_gather_first_dim, all_to_all_rows
from megatron.core.process_group import Group


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
        ctx: Any, rows: torch.Tensor, weights: torch.Tensor, slots: torch.Tensor, choices: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(rows, weights, slots, choices)
        return torch.bmm(weights.unsqueeze(1), _rows_at(rows, slots)).squeeze(1)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        rows, weights, slots, choices = ctx.saved_tensors
        weights_grad = torch.bmm(_rows_at(rows, slots), grad.unsqueeze(-1)).squeeze(-1)
        of_row = weights.reshape(-1)[choices]
        rows_grad = grad.index_select(0, choices.div(slots.shape[1], rounding_mode="floor")).mul_(of_row.unsqueeze(-1))
        return rows_grad, weights_grad, None, None


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
    """Return the rows of each token; the one behind the last is zero.

    Shapes: ``rows: [m, h]``, ``slots: [n, c] -> [n, c, h]``.
    """
    if len(rows) < slots.numel():
        rows = F.pad(rows, (0, 0, 0, 1))
    return rows.index_select(0, slots.reshape(-1)).view(*slots.shape, rows.shape[-1])


def take_rows(x: torch.Tensor, choices: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return a row of ``x`` for each choice; ``slots`` says which rows of the result are a token's, ``m`` for none.

    Shapes: ``x: [n, h]``, ``choices: [m]`` numbers of ``slots: [n, c]``, flattened ``-> [m, h]``.
    """
    sources = choices.div(slots.shape[1], rounding_mode="floor")
    result: torch.Tensor = _TakeRows.apply(x, sources, slots)  # type: ignore[no-untyped-call]
    return result


def combine(rows: torch.Tensor, weights: torch.Tensor, choices: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's rows: `take_rows` undone.

    Shapes: ``rows: [m, h]``, ``weights, slots: [n, c]``, ``choices: [m] -> [n, h]``.
    """
    result: torch.Tensor = _Combine.apply(rows, weights, slots, choices)  # type: ignore[no-untyped-call]
    return result


def reorder(rows: torch.Tensor, order: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """Return rows in another order, of which the ``inverse`` is known.

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
    """Give each rank of the group its rows, and return those that this rank is given, in group order.

    ``meanwhile`` is called while the rows travel. Backward: the same exchange in the other direction.

    Shapes: ``[sum(sent), h] -> [sum(received), h]``.
    """
    result: torch.Tensor = _AllToAll.apply(rows, tuple(sent), tuple(received), group, meanwhile)  # type: ignore[no-untyped-call]
    return result


def gather_copies(rows: torch.Tensor, tp: Group) -> torch.Tensor:
    """Join the ranks' parts, with which every rank computes the same. Backward: this rank's part of the gradient.

    Shapes: ``[n, h] -> [n * tp, h]``.
    """
    result: torch.Tensor = _GatherCopies.apply(rows, tp)  # type: ignore[no-untyped-call]
    return result
