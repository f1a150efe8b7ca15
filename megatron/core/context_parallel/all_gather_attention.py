"""Attention with the keys and values of all context-parallel ranks gathered: one collective, and any attention core."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron.core.context_parallel.partition import chunk_length, chunks_of, to_sequence_order, visible_keys
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region

Core = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, "torch.Tensor | None", float], torch.Tensor]
"""(query, key, value, mask, dropout) -> context, of sequences that are not cut; without a mask, the queries are the
last positions of the keys."""


@dataclass(frozen=True)
class AllGatherAttention:
    """Attend with this rank's queries to the gathered keys and values of the whole sequence.

    Each of the rank's two chunks is given to ``core`` with the keys up to its own end. Forward: all-gather of keys and
    values along s; backward: reduce-scatter of their gradients.

    Shapes: ``query: [s/cp, b, n, d]``, ``key, value: [s/cp, b, g, d]``, ``document_ids: [b, s]`` (of the whole
    sequence in its own order) or None; ``-> [s/cp, b, n, d]``.
    """

    cp: Group
    core: Core

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        document_ids: torch.Tensor | None,
        dropout: float,
    ) -> torch.Tensor:
        """Return the attention output."""
        both = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), self.cp)
        keys, values = to_sequence_order(both, self.cp.size, dim=0).unbind(dim=1)
        chunk = chunk_length(keys.shape[0], self.cp.size)
        context = []
        for queries, index in zip(query.chunk(2), chunks_of(self.cp.rank, self.cp.size)):
            start, end = index * chunk, (index + 1) * chunk
            mask = None
            if document_ids is not None:
                positions = torch.arange(end, device=query.device)
                documents = document_ids[:, :end]
                mask = visible_keys(positions[start:], positions, documents[:, start:], documents)
            context.append(self.core(queries, keys[:end], values[:end], mask, dropout))
        return torch.cat(context)
