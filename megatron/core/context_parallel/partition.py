"""The zigzag split of a sequence over context-parallel ranks, which balances the work of causal attention.

The sequence is split into ``2 · size`` chunks. Rank ``r`` holds chunk ``r`` and chunk ``2 · size − 1 − r``: an early
chunk, which attends to few keys, and a late chunk, which attends to many. "Rank order" below means the concatenation of
the parts of rank 0, 1, …, as in the result of a collective.
"""

from __future__ import annotations

import torch

from megatron.core.process_group import Group


def chunks_of(rank: int, size: int) -> tuple[int, int]:
    """Return the numbers of the two chunks that a rank holds, in ascending order."""
    return rank, 2 * size - 1 - rank


def chunk_length(length: int, size: int) -> int:
    """Return the chunk length of a sequence.

    Raises:
        ValueError: the sequence cannot be split into equal chunks.
    """
    if length % (2 * size):
        raise ValueError(f"a sequence of {length} tokens cannot be divided into 2 x {size} equal chunks")
    return length // (2 * size)


def positions_of(rank: int, size: int, length: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return the positions in the whole sequence that a rank holds, in ascending order.

    Shapes: ``-> [length / size]`` int64.
    """
    chunk = chunk_length(length, size)
    starts = (index * chunk for index in chunks_of(rank, size))
    return torch.cat([torch.arange(start, start + chunk, device=device) for start in starts])


def cut_sequence(tensor: torch.Tensor, cp: Group, dim: int) -> torch.Tensor:
    """Return this rank's part of a whole sequence along ``dim``; without context parallelism the tensor itself.

    Shapes: ``[…, s, …] -> […, s/cp, …]``.
    """
    if cp.size == 1:
        return tensor
    chunk = chunk_length(tensor.shape[dim], cp.size)
    return torch.cat([tensor.narrow(dim, index * chunk, chunk) for index in chunks_of(cp.rank, cp.size)], dim=dim)


def to_sequence_order(tensor: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Reorder a sequence from rank order into its original order.

    Shapes: ``[…, s, …] -> […, s, …]``.
    """
    order = _chunks_in_rank_order(size)
    return _permute_chunks(tensor, [order.index(chunk) for chunk in range(2 * size)], dim)


def to_rank_order(tensor: torch.Tensor, size: int, dim: int) -> torch.Tensor:
    """Reorder a sequence into rank order: the parts of rank 0, 1, ….

    Shapes: ``[…, s, …] -> […, s, …]``.
    """
    return _permute_chunks(tensor, _chunks_in_rank_order(size), dim)


def _chunks_in_rank_order(size: int) -> list[int]:
    return [chunk for rank in range(size) for chunk in chunks_of(rank, size)]


def _permute_chunks(tensor: torch.Tensor, order: list[int], dim: int) -> torch.Tensor:
    chunks = tensor.chunk(len(order), dim=dim)
    return torch.cat([chunks[index] for index in order], dim=dim)
