"""Attention with the keys and values of all context-parallel ranks gathered: one collective, and any attention core."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.context_parallel.partition import chunk_length, chunks_of, to_sequence_order
from megatron.core.kernels.attention_pattern import AttentionPattern
from megatron.core.kernels.dot_product_attention import AttentionCore
from megatron.core.kernels.dropout_keys import AttentionDropout
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region


@dataclass(frozen=True)
class AllGatherAttention:
    """Attend with this rank's queries to the gathered keys and values of the whole sequence.

    Each of the rank's two chunks is given to ``core`` with the keys that it may look at: up to its own end where
    attention is causal, and from where its first query's window begins. No mask is made of positions: the core is told
    which part of the pattern it is. Forward: all-gather of keys and values along s;
    backward: reduce-scatter of their gradients.

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
        both = gather_from_sequence_parallel_region(torch.stack((key, value), dim=1), self.cp)
        keys, values = to_sequence_order(both, self.cp.size, dim=0).unbind(dim=1)
        chunk = chunk_length(keys.shape[0], self.cp.size)
        context = []
        for queries, index in zip(query.chunk(2), chunks_of(self.cp.rank, self.cp.size)):
            start, end = index * chunk, (index + 1) * chunk
            first = 0 if pattern.window is None else max(0, start + 1 - pattern.window)
            last = end if pattern.is_causal else keys.shape[0]
            part, of_part = pattern.part(range(start, end), range(first, last)), None
            if dropout:
                positions = torch.arange(last, device=query.device)
                of_part = dropout.of_chunk(index, positions[start:end], positions[first:])
            context.append(self.core(queries, keys[first:last], values[first:last], part, of_part, sinks=sinks))
        return torch.cat(context)
