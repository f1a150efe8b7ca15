"""Permutation of tokens to rows sorted by expert, and the weighted sum of each token's rows, with their gradients.

On CUDA each function is one Triton kernel without an intermediate tensor of the size of all rows. The torch versions
define the results. The functions do not record gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.core.ops.gemm import RowEnds
from megatron.core.ops.triton_support import runs_on_triton


@dataclass(frozen=True, eq=False)
class RowOrder:
    """The row of each choice of each token, and the choice of each row.

    ``choices`` are indices into the flattened ``slots``. A row without a choice (padding) has ``n * c`` or more, and a
    choice without a row (dropped) has the slot ``m`` or more. Each flag is False only if there is no such row, or no
    such choice.

    Shapes: ``choices: [m]``, ``slots: [n, c]``.
    """

    choices: torch.Tensor
    slots: torch.Tensor
    has_empty_rows: bool = False
    has_dropped_choices: bool = False

    @property
    def per_token(self) -> int:
        return self.slots.shape[1]

    def tokens(self) -> torch.Tensor:
        """Return the token of each row; ``n`` or more for a row without a choice. Shapes: ``-> [m]``."""
        return self.choices.div(self.per_token, rounding_mode="floor")


def gather_rows(x: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Return the token of each row's choice, and zeros for a row without a choice.

    Shapes: ``x: [n, h] -> [m, h]``.
    """
    if runs_on_triton(x):
        from megatron.core.ops.triton import gather_rows as on_triton

        return on_triton(x, order.choices, order.per_token)
    if not order.has_empty_rows:
        return x.index_select(0, order.tokens())
    return F.pad(x, (0, 0, 0, 1)).index_select(0, order.tokens().clamp(max=len(x)))


def sum_rows(rows: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Return the sum of each token's rows: the gradient of `gather_rows`.

    Shapes: ``rows: [m, h] -> [n, h]``.
    """
    if runs_on_triton(rows):
        from megatron.core.ops.triton import sum_rows as on_triton

        return on_triton(rows, None, order.slots, rows.dtype)
    return _rows_of_tokens(rows, order).sum(dim=1)


def combine_rows(rows: torch.Tensor, weights: torch.Tensor, order: RowOrder, dtype: torch.dtype) -> torch.Tensor:
    """Return the weighted sum of each token's rows, rounded to ``dtype``.

    The torch version sums in the dtype of the weights, which may be wider. It then processes one choice at a time, so
    that only one row per token is converted.

    Shapes: ``rows: [m, h]``, ``weights: [n, c] -> [n, h]``.
    """
    if runs_on_triton(rows, weights):
        from megatron.core.ops.triton import sum_rows as on_triton

        return on_triton(rows, weights, order.slots, dtype)
    if weights.dtype == rows.dtype:
        return torch.bmm(weights.unsqueeze(1), _rows_of_tokens(rows, order)).squeeze(1).to(dtype)
    rows, slots = _with_row_of_zeros(rows, order)
    total = weights.new_zeros(len(slots), rows.shape[1])
    for places, of_choice in zip(slots.unbind(1), weights.unbind(1)):
        total.addcmul_(rows.index_select(0, places), of_choice.unsqueeze(1))
    return total.to(dtype)


def combine_gradients(
    grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, order: RowOrder
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of the rows and of the weights of `combine_rows`; a row without a choice has zeros.

    Shapes: ``grad: [n, h]``, ``rows: [m, h]``, ``weights: [n, c] -> [m, h]``, ``[n, c]``.
    """
    if runs_on_triton(grad, rows, weights):
        from megatron.core.ops.triton import combine_gradients as on_triton

        rows_grad, weights_grad = on_triton(grad, rows, weights, order.choices, order.has_dropped_choices)
        assert rows_grad is not None
        return rows_grad, weights_grad
    return weighted_rows(grad, weights, order), weights_gradient(grad, rows, weights, order)


def weights_gradient(grad: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Return the gradient of the weights of `combine_rows`.

    Shapes: ``grad: [n, h]``, ``rows: [m, h]``, ``weights: [n, c] -> [n, c]``.
    """
    if runs_on_triton(grad, rows, weights):
        from megatron.core.ops.triton import combine_gradients as on_triton

        _, found = on_triton(grad, rows, weights, order.choices, order.has_dropped_choices, of_rows=False)
        return found
    if weights.dtype == rows.dtype:
        return torch.bmm(_rows_of_tokens(rows, order), grad.unsqueeze(-1)).squeeze(-1)
    padded, slots = _with_row_of_zeros(rows, order)
    wide = grad.to(weights.dtype)
    products = [(wide * padded.index_select(0, places)).sum(dim=1) for places in slots.unbind(1)]
    return torch.stack(products, dim=1)


def weighted_rows(x: torch.Tensor, weights: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Return the token of each row's choice times the weight of the choice, and zeros for a row without a choice.

    Shapes: ``x: [n, h]``, ``weights: [n, c] -> [m, h]``.
    """
    of_row, choices = weights.reshape(-1), order.choices
    if order.has_empty_rows:
        of_row, choices = F.pad(of_row, (0, 1)), choices.clamp(max=weights.numel())
    return gather_rows(x, order).mul_(of_row[choices].unsqueeze(-1))


def _rows_of_tokens(rows: torch.Tensor, order: RowOrder) -> torch.Tensor:
    """Return the rows of each token, zeros for a dropped choice. Shapes: ``rows: [m, h] -> [n, c, h]``."""
    rows, slots = _with_row_of_zeros(rows, order)
    return rows.index_select(0, slots.reshape(-1)).view(*slots.shape, rows.shape[-1])


def _with_row_of_zeros(rows: torch.Tensor, order: RowOrder) -> tuple[torch.Tensor, torch.Tensor]:
    """Append a row of zeros for dropped choices, if there may be any, and return the slots in it."""
    if not order.has_dropped_choices:
        return rows, order.slots
    return F.pad(rows, (0, 0, 0, 1)), order.slots.clamp(max=len(rows))


def add_groups(total: torch.Tensor, groups: torch.Tensor, counts: RowEnds, *, overwrite: bool) -> None:
    """Add the matrix of each group with rows to ``total``, or overwrite it; a group without rows counts as zeros.

    The memory of a group without rows may be uninitialized.

    Shapes: ``total, groups: [groups, out, in]``.
    """
    if runs_on_triton(total, groups):
        from megatron.core.ops.triton import add_groups as on_triton

        on_triton(total, groups, counts.ends, overwrite=overwrite)
        return
    groups.masked_fill_(counts.are_empty()[:, None, None], 0.0)
    if overwrite:
        total.copy_(groups)
    else:
        total.add_(groups)
