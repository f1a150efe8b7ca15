"""All-to-all between sequence shards and head shards, and the heads that each context-parallel rank receives.

Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron.core.collectives import all_to_all_first_dim
from megatron.core.context_parallel.partition import to_rank_order, to_sequence_order
from megatron.core.process_group import Group


class StackedHeads(NamedTuple):
    """Rows of one of the tensors that are stacked in a projection or a convolution: heads of equal width.

    ``copies`` is the number of context-parallel shares of each head, as `copies_of_key_value_heads` returns it.
    """

    num_heads: int
    width: int = 1
    copies: int = 1

    @property
    def num_rows(self) -> int:
        return self.num_heads * self.width

    def rows_of_rank(self, cp_size: int) -> int:
        return self.num_rows * self.copies // cp_size

    def copied(self, rows: torch.Tensor, dim: int) -> torch.Tensor:
        """Repeat each head. Shapes: ``[…, rows, …] -> […, copies * rows, …]`` along ``dim``."""
        if self.copies == 1:
            return rows
        heads = rows.view(*rows.shape[:dim], self.num_heads, self.width, *rows.shape[dim + 1 :])
        return heads.repeat_interleave(self.copies, dim=dim).flatten(dim, dim + 1)


def rows_of_heads(parameter: torch.Tensor, stacked: Sequence[StackedHeads], cp: Group) -> torch.Tensor:
    """Return the rows of a parameter for the heads that this rank receives; without context parallelism all rows.

    Shapes: ``[rows, …] -> [rows of rank, …]``.
    """
    if cp.size == 1:
        return parameter
    parts = parameter.split_with_sizes([heads.num_rows for heads in stacked])
    return torch.cat(
        [heads.copied(part, dim=0).chunk(cp.size)[cp.rank] for heads, part in zip(stacked, parts, strict=True)]
    )


def sequence_to_heads(tensors: Sequence[torch.Tensor], cp: Group) -> torch.Tensor:
    """Exchange sequence shards for head shards: this rank's share of each tensor's channels, at all positions.

    The shares are stacked in the order of the tensors, and the positions are in the order of the sequence. Forward and
    backward: all-to-all.

    Shapes: ``[s/cp, b, …]`` each ``-> [s, b, sum of channels / cp]``.
    """
    shares = [tensor.reshape(*tensor.shape[:2], cp.size, -1) for tensor in tensors]
    # [s/cp, b, cp, channels/cp], with the receiving rank first; the result has the sending rank first.
    received = _all_to_all(torch.cat(shares, dim=3).movedim(2, 0), cp).flatten(0, 1)
    return to_sequence_order(received, cp.size, dim=0)


def heads_to_sequence(tensor: torch.Tensor, cp: Group) -> torch.Tensor:
    """Exchange head shards for sequence shards, the inverse of `sequence_to_heads` for one tensor.

    Shapes: ``[s, b, channels/cp] -> [s/cp, b, channels]``.
    """
    ordered = to_rank_order(tensor, cp.size, dim=0)
    received = _all_to_all(ordered.view(cp.size, -1, *ordered.shape[1:]), cp)
    return received.movedim(0, 2).flatten(2)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, cp: Group) -> torch.Tensor:
        ctx.cp = cp
        return all_to_all_first_dim(tensor, cp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_to_all_first_dim(grad, ctx.cp), None


def _all_to_all(tensor: torch.Tensor, cp: Group) -> torch.Tensor:
    """Send row i to rank i. Forward and backward: all-to-all along dim 0. Shapes: ``[cp, …] -> [cp, …]``."""
    received: torch.Tensor = _AllToAll.apply(tensor, cp)  # type: ignore[no-untyped-call]
    return received
