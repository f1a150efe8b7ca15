"""Attention with heads sharded in place of the sequence, by an all-to-all before it and another after it.

Jacobs et al. 2023, https://arxiv.org/abs/2309.14509.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.core.collectives import all_to_all_first_dim
from megatron.core.context_parallel.head_sharing import copies_of_key_value_heads
from megatron.core.context_parallel.partition import to_rank_order, to_sequence_order
from megatron.core.kernels.attention_pattern import AttentionPattern
from megatron.core.kernels.dot_product_attention import AttentionCore
from megatron.core.kernels.dropout_keys import AttentionDropout
from megatron.core.process_group import Group


@dataclass(frozen=True)
class UlyssesAttention:
    """Attend with a share of the heads to the whole sequence.

    Key-value heads that are too few for the ranks are repeated, and their gradients summed. Forward: all-to-all from
    the sequence to the heads and back; backward: the same in the other order.

    Shapes: ``query: [s/cp, b, n, d]``, ``key, value: [s/cp, b, g, d]`` ``-> [s/cp, b, n, d]``.
    """

    cp: Group
    core: AttentionCore

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        pattern: AttentionPattern,
        dropout: AttentionDropout | None,
        *,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the attention output."""
        size, num_heads, num_groups = self.cp.size, query.shape[2], key.shape[2]
        copies = copies_of_key_value_heads(num_heads, num_groups, size)
        assert copies is not None, f"{num_heads} heads in {num_groups} groups cannot be shared by {size} ranks"
        key, value = (tensor.repeat_interleave(copies, dim=2) for tensor in (key, value))
        widths = [tensor.shape[2] // size for tensor in (query, key, value)]
        local_length, batch, _, head_dim = query.shape
        shares = [tensor.reshape(local_length, batch, size, -1, head_dim) for tensor in (query, key, value)]
        # [s/cp, b, cp, heads/cp, d] with the receiving rank first; what arrives has the sending rank first.
        received = _all_to_all(torch.cat(shares, dim=3).movedim(2, 0), self.cp).flatten(0, 1)
        queries, keys, values = torch.split(to_sequence_order(received, size, dim=0), widths, dim=2)
        own = slice(self.cp.rank * widths[0], (self.cp.rank + 1) * widths[0])
        if dropout:
            positions = torch.arange(size * local_length, device=query.device)
            dropout = replace(dropout, queries=positions, heads=dropout.heads[own])
        of_heads = None if sinks is None else sinks[own]
        context = self.core(queries, keys, values, pattern, dropout, sinks=of_heads)
        context = to_rank_order(context, size, dim=0)
        received = _all_to_all(context.view(size, local_length, *context.shape[1:]), self.cp)
        return received.movedim(0, 2).flatten(2, 3)


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, cp: Group) -> torch.Tensor:
        ctx.cp = cp
        return all_to_all_first_dim(tensor, cp)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return all_to_all_first_dim(grad, ctx.cp), None


def _all_to_all(tensor: torch.Tensor, cp: Group) -> torch.Tensor:
    """Give row i to rank i. Forward and backward: all-to-all along dim 0. Shapes: ``[cp, …] -> [cp, …]``."""
    received: torch.Tensor = _AllToAll.apply(tensor, cp)  # type: ignore[no-untyped-call]
    return received
