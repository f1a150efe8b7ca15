"""Chunks of positions: the shared parts of the operators' chunked forms.

A chunked form processes slabs of batch entries and heads one after the other. The temporary tensors of a slab fit into
a cache of the CPU, and the backward pass computes them again instead of saving them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

MAX_HEAD_DIM = 128
"""Wider heads of a selective scan do not fit into the registers of one Triton program."""
MIN_LOG_DECAY = -50.0
"""Stronger decay is computed as this one, 2e-22 per position, which keeps differences of sums of decays precise."""
_SLAB_ELEMENTS = 1 << 18
_CUDA_SLAB_ELEMENTS = 1 << 28
_SUBSTITUTED_ROWS = 16


def chunk_length(chunk_size: int, num_positions: int) -> int:
    """Return the number of positions per chunk: ``chunk_size``, or less for a short sequence.

    Raises:
        ValueError: ``chunk_size`` is no power of two.
    """
    if chunk_size < 1 or chunk_size & (chunk_size - 1):
        raise ValueError(f"chunk_size is {chunk_size}, but must be a power of two")
    return min(chunk_size, 1 << max(0, num_positions - 1).bit_length())


def run_in_chunks(
    chunked: type[torch.autograd.Function],
    recurrent: Callable[..., tuple[torch.Tensor, torch.Tensor | None]],
    x: torch.Tensor,
    *arguments: torch.Tensor | None,
    return_state: bool,
    chunk_size: int,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return the output and last state for ``x: [b, s, ...]`` and other arguments: in chunks unless their length is 1.

    Raises:
        ValueError: ``chunk_size`` is no power of two.
    """
    length = chunk_length(chunk_size, x.shape[1])
    if length == 1:
        return recurrent(x, *arguments, return_state=return_state)
    output, state = chunked.apply(x, *arguments, length)  # type: ignore[no-untyped-call]
    return output, state if return_state else None


def start_states(
    x: torch.Tensor, length: int, rows: int, columns: int, dtype: torch.dtype, initial_state: torch.Tensor | None
) -> torch.Tensor:
    """Return memory for the states before each chunk and after the last one, of which the first state is set.

    Shapes: ``x: [b, s, n, ...], initial_state: [b, n, rows, columns] -> [b, n, chunks + 1, rows, columns]``.
    """
    batch, num_positions, heads = x.shape[:3]
    states = x.new_empty(batch, heads, -(-num_positions // length) + 1, rows, columns, dtype=dtype)
    states[:, :, 0] = 0.0 if initial_state is None else initial_state
    return states


def start_state_gradients(states: torch.Tensor, slab: Slab, last_state_grad: torch.Tensor | None) -> torch.Tensor:
    """Return memory for the gradients of a slab's states after each chunk, of which the last one is set.

    Shapes: ``states: [slab of b, slab of n, chunks + 1, rows, columns], last_state_grad: [b, n, rows, columns] -> [slab
    of b, slab of n, chunks, rows, columns]``.
    """
    grads = torch.zeros_like(states[:, :, 1:])
    if last_state_grad is not None:
        grads[:, :, -1] = slab.of_states(last_state_grad)
    return grads


def keep_for_backward(ctx: Any, length: int, initial_state: torch.Tensor | None, *tensors: torch.Tensor | None) -> None:
    """Save the tensors, the length of a chunk, and the dtype of the initial state, if there is one."""
    ctx.save_for_backward(*tensors)
    ctx.length, ctx.state_dtype = length, None if initial_state is None else initial_state.dtype
    ctx.set_materialize_grads(False)


@dataclass(frozen=True)
class Slab:
    """Some batch entries and heads."""

    batch: slice
    heads: slice

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: ``[b, s, n, ...] -> [slab of b, s, slab of n, ...]``."""
        return x[self.batch, :, self.heads]

    def of_states(self, x: torch.Tensor) -> torch.Tensor:
        """Shapes: ``[b, n, ...] -> [slab of b, slab of n, ...]``."""
        return x[self.batch, self.heads]


def slabs(x: torch.Tensor, elements_per_head: int, heads_per_group: int = 1) -> Iterator[Slab]:
    """Yield slabs of whole groups of heads, or of a part of the heads of one group.

    Shapes: ``x: [b, s, n, ...]``.
    """
    batch, heads = x.shape[0], x.shape[2]
    limit = _CUDA_SLAB_ELEMENTS if x.is_cuda else _SLAB_ELEMENTS
    heads_per_slab = max(1, limit // max(1, elements_per_head))
    batch_per_slab = max(1, heads_per_slab // heads)
    if heads_per_slab >= heads_per_group:
        heads_per_slab -= heads_per_slab % heads_per_group
        bounds = [*range(0, heads, heads_per_slab), heads]
    else:
        groups = range(0, heads, heads_per_group)
        bounds = [start for group in groups for start in range(group, group + heads_per_group, heads_per_slab)]
        bounds = sorted({*bounds, heads, *groups})
    for entry in range(0, batch, batch_per_slab):
        for start, stop in pairwise(bounds):
            yield Slab(slice(entry, min(entry + batch_per_slab, batch)), slice(start, stop))


def to_chunks(x: torch.Tensor, length: int, dtype: torch.dtype) -> torch.Tensor:
    """Cut the positions into chunks, and fill the last chunk with zeros.

    Shapes: ``[b, s, n, ...] -> [b, n, chunks, length, ...]``.
    """
    x = x.transpose(1, 2)
    missing = -x.shape[2] % length
    if missing:
        x = F.pad(x, (*(0, 0) * (x.dim() - 3), 0, missing))
    return torch.unflatten(x.to(dtype).contiguous(), 2, (-1, length))


def from_chunks(x: torch.Tensor, num_positions: int) -> torch.Tensor:
    """Invert `to_chunks`, but for the dtype.

    Shapes: ``[b, n, chunks, length, ...] -> [b, s, n, ...]``.
    """
    return x.flatten(2, 3)[:, :, :num_positions].transpose(1, 2)


@dataclass(frozen=True)
class Documents:
    """Which positions of a chunk belong to one document, and to the documents before and after the chunk.

    Shapes: ``starts: [b, 1, chunks, length]`` of bool, where a document starts; ``enters``, of the same shape, 1 where
    the state before the chunk passes in; ``leaves``, 1 where a position passes into the state after the chunk;
    ``passes: [b, 1, chunks]``, 1 where the state before the chunk passes into the state after it;
    ``same: [b, 1, chunks, length, length]`` of bool, where two positions belong to one document.
    """

    starts: torch.Tensor
    enters: torch.Tensor
    leaves: torch.Tensor
    passes: torch.Tensor
    same: torch.Tensor

    @staticmethod
    def of(document_starts: torch.Tensor | None, length: int, dtype: torch.dtype) -> Documents | None:
        """Derive the relations of a whole batch; there are none without starts.

        Shapes: ``document_starts: [b, s]`` of bool.
        """
        if document_starts is None:
            return None
        starts = to_chunks(document_starts[:, :, None], length, torch.bool)
        number = starts.cumsum(dim=-1)
        last = number[..., -1:]
        return Documents(
            starts,
            (number == 0).to(dtype),
            (number == last).to(dtype),
            (last == 0).squeeze(-1).to(dtype),
            number[..., :, None] == number[..., None, :],
        )

    def part(self, batch: slice) -> Documents:
        return Documents(
            self.starts[batch], self.enters[batch], self.leaves[batch], self.passes[batch], self.same[batch]
        )


@dataclass(frozen=True)
class Decays:
    """Decays within chunks: of states on their way into, through and out of each chunk, and between positions.

    Every exponent is at most 0, so that strong decay cannot overflow. ``d`` is 1 for a decay per head.

    Shapes: ``sums: [b, n, chunks, length, d]``, sums of logarithms from the start of the chunk; ``enter`` and
    ``leave``, of the same shape; ``through: [b, n, chunks, d, 1]``.
    """

    sums: torch.Tensor
    enter: torch.Tensor
    leave: torch.Tensor
    through: torch.Tensor
    documents: Documents | None

    @staticmethod
    def of(log_decay: torch.Tensor, documents: Documents | None) -> Decays:
        """Shapes: ``log_decay: [b, n, chunks, length, d]``."""
        log_decay = log_decay.clamp(min=MIN_LOG_DECAY)
        if documents is not None:
            log_decay = log_decay.masked_fill(documents.starts[..., None], 0.0)
        sums = log_decay.cumsum(dim=3)
        last = sums[..., -1:, :]
        enter, leave, through = sums.exp(), (last - sums).exp(), last.exp().transpose(-1, -2)
        if documents is not None:
            enter = enter * documents.enters[..., None]
            leave = leave * documents.leaves[..., None]
            through = through * documents.passes[..., None, None]
        return Decays(sums, enter, leave, through, documents)

    def between(self) -> torch.Tensor:
        """Return the decay per head from each position (last axis) to each later one; 0 if none passes.

        Shapes: ``-> [b, n, chunks, length, length]``.
        """
        length = self.sums.shape[3]
        future = torch.full((length, length), -torch.inf, dtype=self.sums.dtype, device=self.sums.device).triu_(1)
        result = self.sums - self.sums.transpose(-1, -2)
        result += future
        result.exp_()
        return result if self.documents is None else result.mul_(self.documents.same)

    def log_decay_grad(self, log_decay: torch.Tensor, sums_grad: torch.Tensor) -> torch.Tensor:
        """Return the gradient of ``log_decay``, given the gradient of its sums, which it overwrites.

        Shapes: ``[b, n, chunks, length, d]``.
        """
        grad = sums_grad.flip(3).cumsum(dim=3).flip(3)
        grad = grad.masked_fill_(log_decay < MIN_LOG_DECAY, 0.0)
        return grad if self.documents is None else grad.masked_fill_(self.documents.starts[..., None], 0.0)


def unit_lower_inverse(x: torch.Tensor) -> torch.Tensor:
    """Return the inverse of ``I`` plus the part of ``x`` below the diagonal, by substitution in blocks.

    Shapes: ``[..., c, c] -> [..., c, c]`` for ``c`` a power of two.
    """
    size = x.shape[-1]
    block = min(size, _SUBSTITUTED_ROWS)
    diagonal = _diagonal_blocks(x, block, block)
    eye = torch.eye(block, dtype=x.dtype, device=x.device).expand_as(diagonal)
    inverse: torch.Tensor = torch.linalg.solve_triangular(diagonal, eye, upper=False, unitriangular=True)
    while block < size:
        first, second = torch.unflatten(inverse, -3, (-1, 2)).unbind(dim=-3)
        below = -(second @ (_diagonal_blocks(x, block, 2 * block) @ first))
        inverse = x.new_zeros(*first.shape[:-2], 2 * block, 2 * block)
        inverse[..., :block, :block] = first
        inverse[..., block:, :block] = below
        inverse[..., block:, block:] = second
        block *= 2
    return inverse.squeeze(-3)


def _diagonal_blocks(x: torch.Tensor, block: int, stride: int) -> torch.Tensor:
    """Return the lower left block of each of the blocks of size ``stride`` on the diagonal.

    Shapes: ``[..., c, c] -> [..., c / stride, block, block]``.
    """
    return diagonal_of_blocks(x, stride)[..., stride - block :, :block].contiguous()


def diagonal_of_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """Return a view of the blocks on the diagonal.

    Shapes: ``[..., c, c] -> [..., c / block, block, block]``.
    """
    blocks = torch.unflatten(torch.unflatten(x, -2, (-1, block)), -1, (-1, block))
    diagonal: torch.Tensor = blocks.diagonal(dim1=-4, dim2=-2).movedim(-1, -3)
    return diagonal
