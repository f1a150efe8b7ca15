"""Context-parallel attention: all-gather, Ulysses all-to-all, ring, and ring within Ulysses.

All-gather: the keys and values of all ranks are gathered in one collective, for any core attention.
Ulysses: an all-to-all before attention and another after it shard the heads instead of the sequence. Jacobs et al.
2023, https://arxiv.org/abs/2309.14509.
Ring: keys and values are passed around the ranks while each rank attends to the block that it holds. With the zigzag
split no rank waits for another: after the rank's own block, every step is half a block of work on every rank. Liu et
al. 2023, https://arxiv.org/abs/2310.01889.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from megatron.core.collectives import start_ring_exchange
from megatron.core.context_parallel.head_exchange import heads_to_sequence, sequence_to_heads
from megatron.core.context_parallel.key_value_heads import copies_of_key_value_heads
from megatron.core.context_parallel.partition import (
    chunk_length,
    chunks_of,
    positions_of,
    to_sequence_order,
)
from megatron.core.ops import (
    AttentionBlocks,
    AttentionCore,
    AttentionDropout,
    AttentionInputs,
    AttentionPattern,
    BlockMask,
    merge_block,
    merge_sinks,
    sinks_gradient,
)
from megatron.core.precision import arithmetic_dtype
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


@dataclass(frozen=True)
class AllGatherAttention:
    """All-gather context parallelism: this rank's queries attend to the gathered keys and values.

    For each of the rank's two chunks, ``core`` gets only the keys that the chunk can attend to: up to the chunk's end
    for causal attention, and from the start of its first query's window. The core gets the part of the pattern instead
    of a mask of positions. If the pattern has a mask, of this rank's queries and all keys, ``core`` gets all of them at
    once. Forward: all-gather of keys and values along s; backward: reduce-scatter of their gradients.

    Shapes: ``query: [s/cp, b, n, d]``, ``key, value: [s/cp, b, g, d]`` ``-> [s/cp, b, n, d]``.
    """

    cp: Group
    core: AttentionCore

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        pattern, device = inputs.pattern, inputs.query.device
        both = gather_from_sequence_parallel_region(torch.stack((inputs.key, inputs.value), dim=1), group=self.cp)
        keys, values = to_sequence_order(both, self.cp.size, dim=0).unbind(dim=1)
        length = keys.shape[0]
        if pattern.mask is not None:
            dropout = inputs.dropout
            if dropout:
                queries = positions_of(self.cp.rank, self.cp.size, length, device)
                dropout = dropout.of_chunk(self.cp.rank, queries, torch.arange(length, device=device))
            return self.core(AttentionInputs(inputs.query, keys, values, pattern, dropout, inputs.sinks))
        chunk = chunk_length(length, self.cp.size)
        context = []
        for queries, index in zip(inputs.query.chunk(2), chunks_of(self.cp.rank, self.cp.size)):
            start, end = index * chunk, (index + 1) * chunk
            first = 0 if pattern.window is None else max(0, start + 1 - pattern.window)
            last = end if pattern.is_causal else length
            part, dropout = pattern.part(range(start, end), range(first, last)), inputs.dropout
            if dropout:
                positions = torch.arange(last, device=device)
                dropout = dropout.of_chunk(index, positions[start:end], positions[first:])
            heads = (queries, keys[first:last], values[first:last])
            context.append(self.core(AttentionInputs(*heads, part, dropout, inputs.sinks)))
        return torch.cat(context)


@dataclass(frozen=True)
class UlyssesAttention:
    """Ulysses context parallelism: each rank attends with a part of the heads to the whole sequence.

    If there are fewer key-value heads than ranks require, they are repeated, and their gradients are summed. Forward:
    all-to-all from sequence to heads and back; backward: the same in reverse order.

    Shapes: ``query: [s/cp, b, n, d]``, ``key, value: [s/cp, b, g, d]`` ``-> [s/cp, b, n, d]``.
    """

    cp: Group
    core: AttentionCore

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        query, key, value = inputs.heads
        size, num_heads, num_groups = self.cp.size, query.shape[2], key.shape[2]
        copies = copies_of_key_value_heads(num_heads, num_groups, size)
        assert copies is not None, f"{num_heads} heads in {num_groups} groups cannot be shared by {size} ranks"
        key, value = (tensor.repeat_interleave(copies, dim=2) for tensor in (key, value))
        widths = [tensor.shape[2] // size for tensor in (query, key, value)]
        received = sequence_to_heads((query, key, value), self.cp)
        received = received.view(*received.shape[:2], -1, query.shape[3])
        queries, keys, values = torch.split(received, widths, dim=2)
        own = slice(self.cp.rank * widths[0], (self.cp.rank + 1) * widths[0])
        dropout = inputs.dropout
        if dropout:
            positions = torch.arange(len(queries), device=query.device)
            dropout = replace(dropout, queries=positions, heads=dropout.heads[own])
        sinks = None if inputs.sinks is None else inputs.sinks[own]
        context = self.core(AttentionInputs(queries, keys, values, inputs.pattern, dropout, sinks))
        return heads_to_sequence(context.flatten(2), self.cp).view(query.shape)


@dataclass(frozen=True)
class RingAttention:
    """Ring attention: queries, keys and values are split by `partition` over the ranks of ``cp``.

    Every rank's keys and values reach all other ranks in ``cp.size − 1`` hops, each overlapped with the previous
    block's computation. Blocks are merged by their log-sum-exp in at least float32. The backward pass sends keys and
    values around the ring again, followed by their gradients, which return to their owner after ``cp.size`` hops. Sinks
    are merged last, as one more block of each rank's own queries.

    Shapes: ``query: [s/cp, b, n, d]``, ``key, value: [s/cp, b, g, d]`` ``-> [s/cp, b, n, d]``.
    """

    cp: Group
    blocks: AttentionBlocks

    def __call__(self, inputs: AttentionInputs) -> torch.Tensor:
        ring = _Ring(self.cp, self.blocks, inputs.pattern, inputs.dropout)
        output: torch.Tensor = _RingFunction.apply(*inputs.heads, inputs.sinks, ring)  # type: ignore[no-untyped-call]
        return output


@dataclass(frozen=True)
class _Step:
    """A rank's block at one ring step: queries from ``first_query`` on, keys before ``end_key``."""

    first_query: int
    end_key: int
    mask: BlockMask


@dataclass(frozen=True)
class _Ring:
    """State of one call that forward and backward share."""

    cp: Group
    blocks: AttentionBlocks
    pattern: AttentionPattern
    dropout: AttentionDropout | None

    def step(self, number: int, query: torch.Tensor) -> _Step:
        """Return the block of a ring step for ``query: [s/cp, …]``, with the keys of rank ``cp.rank − number``.

        For causal attention both of this rank's chunks attend to all of an earlier rank's first chunk and to nothing of
        its second chunk. For a later rank, this rank's first chunk attends to nothing and its second chunk to both
        chunks.
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
        traveling = torch.stack((key, value))
        for number in range(ring.cp.size):
            following = start_ring_exchange(traveling, ring.cp) if number < ring.cp.size - 1 else None
            step = ring.step(number, query)
            keys, values = traveling[:, : step.end_key].permute(0, 2, 3, 1, 4)
            block = ring.blocks.forward(heads_first[:, :, step.first_query :], keys, values, step.mask)
            if number == 0:
                # A copy, because the kernel may return a tensor that it has saved, and merging is in place.
                output = block[0].to(arithmetic_dtype(query.dtype), copy=True)
                logsumexp = block[1].to(output.dtype, copy=True)
            else:
                merge_block(output[:, :, step.first_query :], logsumexp[:, :, step.first_query :], *block)
            if following is not None:
                traveling = following.wait()
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
        traveling = torch.stack((key, value))
        grads_under_way = None
        for number in range(ring.cp.size):
            following = start_ring_exchange(traveling, ring.cp) if number < ring.cp.size - 1 else None
            step = ring.step(number, query)
            keys, values = traveling[:, : step.end_key].permute(0, 2, 3, 1, 4)
            rows = slice(step.first_query, None)
            block_grads = ring.blocks.backward(
                *(grad[:, :, rows], heads_first[:, :, rows], keys, values),
                *(output[:, :, rows], logsumexp[:, :, rows], step.mask),
            )
            grad_query[:, :, rows] += block_grads[0]
            if grads_under_way is None:
                grads = torch.zeros(traveling.shape, dtype=wide, device=query.device)
            else:
                grads = grads_under_way.wait()
            for index in (0, 1):
                grads[index, : step.end_key] += block_grads[1 + index].permute(2, 0, 1, 3)
            grads_under_way = start_ring_exchange(grads, ring.cp)
            if following is not None:
                traveling = following.wait()
        assert grads_under_way is not None
        grad_key, grad_value = grads_under_way.wait().to(key.dtype)
        return grad_query.permute(2, 0, 1, 3).to(query.dtype), grad_key, grad_value, grad_sinks, None


def with_context_parallel(
    core: AttentionCore, exchange: str, cp: Group, *, plain_blocks: bool = False, softcap: float | None = None
) -> AttentionCore:
    """Wrap ``core`` for sequences that are split over ``cp``; without context parallelism return ``core`` itself.

    The result takes a pattern without a mask, because the mask of a whole sequence would be larger than all other
    tensors of a rank. Only ``all_gather`` takes one, of this rank's queries and all keys. ``plain_blocks`` disables
    fused kernels in ring attention. ``softcap`` must equal the softcap of ``core``. With ``a2a+p2p`` the ranks of the
    group's inner level shard the heads, and each of them forms a ring with ranks of the outer level.
    """
    if cp.size == 1:
        return core
    if exchange == "a2a+p2p":
        assert cp.levels is not None, "the group is cut in no levels"
        inner, outer = cp.levels
        # Inner ranks together hold the two chunks that one rank of a ring of the outer size would hold.
        core = with_context_parallel(core, "p2p", outer, plain_blocks=plain_blocks, softcap=softcap)
        return with_context_parallel(core, "a2a", inner)
    if exchange == "p2p":
        return RingAttention(cp, AttentionBlocks(plain_blocks, softcap))
    if exchange == "all_gather":
        return AllGatherAttention(cp, core)
    assert exchange == "a2a", exchange
    return UlyssesAttention(cp, core)
