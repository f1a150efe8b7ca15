"""Ring attention: keys and values go round the ranks while each of them attends to the block that it holds.

Liu et al. 2023, https://arxiv.org/abs/2310.01889. With the zigzag split no rank waits for another: after its own block,
every step is half a block of work on every rank, whatever the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.core.collectives import start_ring_exchange
from megatron.core.context_parallel.partition import positions_of
from megatron.core.kernels.attention_block import AttentionBlocks, BlockMask, merge_block
from megatron.core.kernels.attention_pattern import AttentionPattern
from megatron.core.kernels.dropout_keys import AttentionDropout
from megatron.core.kernels.sinks.sink_merge import merge_sinks, sinks_gradient
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group


@dataclass(frozen=True)
class RingAttention:
    """Attend to the whole sequence with queries, keys and values split by `partition` over the ranks of ``cp``.

    Every rank's keys and values reach every other in ``cp.size − 1`` hops, each under way while the block before it is
    computed; blocks are merged by their log-sum-exp in at least float32. The backward pass sends keys and
    values round once more, followed by their gradients, which arrive at home after ``cp.size`` hops. Sinks are merged
    in last, as one more block that each rank has for its own queries.

    Shapes: ``query: [s/cp, b, n, d]``, ``key, value: [s/cp, b, g, d]`` ``-> [s/cp, b, n, d]``.
    """

    cp: Group
    blocks: AttentionBlocks

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
        ring = _Ring(self.cp, self.blocks, pattern, dropout)
        output: torch.Tensor = _RingFunction.apply(query, key, value, sinks, ring)  # type: ignore[no-untyped-call]
        return output


@dataclass(frozen=True)
class _Step:
    """Hold what a rank computes at one step: queries from ``first_query`` on, keys before ``end_key``."""

    first_query: int
    end_key: int
    mask: BlockMask


@dataclass(frozen=True)
class _Ring:
    """Hold what both directions of one call have in common."""

    cp: Group
    blocks: AttentionBlocks
    pattern: AttentionPattern
    dropout: AttentionDropout | None

    def step(self, number: int, query: torch.Tensor) -> _Step:
        """Return the work of a step for ``query: [s/cp, …]``; keys and values are those of rank ``cp.rank − number``.

        Where attention is causal, both of this rank's chunks see an earlier rank's first chunk whole and its second not
        at all. Of a later rank's, this rank's first chunk sees nothing and the second sees both whole.
        """
        rank, size, pattern, local_length = self.cp.rank, self.cp.size, self.pattern, query.shape[0]
        source = (rank - number) % size
        first_query, end_key = 0, local_length
        if pattern.is_causal:
            first_query = local_length // 2 if source > rank else 0
            end_key = local_length // 2 if source < rank else local_length
        visible, dropout = None, self.dropout
        if not pattern.is_plain or dropout:
            length = size * local_length
            queries, keys = (positions_of(holder, size, length, query.device) for holder in (rank, source))
            queries, keys = queries[first_query:], keys[:end_key]
            visible = None if pattern.is_plain else pattern.visible(queries, keys)
            dropout = replace(dropout, queries=queries, keys=keys) if dropout else None
        is_causal = pattern.is_plain_causal and number == 0
        return _Step(first_query, end_key, BlockMask(visible, is_causal, dropout))


class _RingFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        ring: _Ring,
    ) -> torch.Tensor:
        heads_first = query.permute(1, 2, 0, 3)
        travelling = torch.stack((key, value))
        for number in range(ring.cp.size):
            following = start_ring_exchange(travelling, ring.cp) if number < ring.cp.size - 1 else None
            step = ring.step(number, query)
            keys, values = travelling[:, : step.end_key].permute(0, 2, 3, 1, 4)
            block = ring.blocks.forward(heads_first[:, :, step.first_query :], keys, values, step.mask)
            if number == 0:
                # A copy, because the kernel may return what it keeps, and merging is in place.
                output = block[0].to(arithmetic_dtype(query.dtype), copy=True)
                logsumexp = block[1].to(output.dtype, copy=True)
            else:
                merge_block(output[:, :, step.first_query :], logsumexp[:, :, step.first_query :], *block)
            if following is not None:
                travelling = following.wait()
        if sinks is not None:
            output, logsumexp = merge_sinks(output, logsumexp, sinks)
        output = output.to(query.dtype)
        ctx.ring = ring
        ctx.save_for_backward(query, key, value, sinks, output, logsumexp)
        return output.permute(2, 0, 1, 3)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, sinks, output, logsumexp = ctx.saved_tensors
        ring: _Ring = ctx.ring
        wide = arithmetic_dtype(query.dtype)
        heads_first, grad = query.permute(1, 2, 0, 3), grad.contiguous().permute(1, 2, 0, 3)
        grad_sinks = sinks_gradient(grad, output, logsumexp, sinks) if ctx.needs_input_grad[3] else None
        grad_query = torch.zeros_like(heads_first, dtype=wide)
        travelling = torch.stack((key, value))
        grads_under_way = None
        for number in range(ring.cp.size):
            following = start_ring_exchange(travelling, ring.cp) if number < ring.cp.size - 1 else None
            step = ring.step(number, query)
            keys, values = travelling[:, : step.end_key].permute(0, 2, 3, 1, 4)
            rows = slice(step.first_query, None)
            block_grads = ring.blocks.backward(
                *(grad[:, :, rows], heads_first[:, :, rows], keys, values),
                *(output[:, :, rows], logsumexp[:, :, rows], step.mask),
            )
            grad_query[:, :, rows] += block_grads[0]
            if grads_under_way is None:
                grads = torch.zeros(travelling.shape, dtype=wide, device=query.device)
            else:
                grads = grads_under_way.wait()
            for index in (0, 1):
                grads[index, : step.end_key] += block_grads[1 + index].permute(2, 0, 1, 3)
            grads_under_way = start_ring_exchange(grads, ring.cp)
            if following is not None:
                travelling = following.wait()
        assert grads_under_way is not None
        grad_key, grad_value = grads_under_way.wait().to(key.dtype)
        return grad_query.permute(2, 0, 1, 3).to(query.dtype), grad_key, grad_value, grad_sinks, None
