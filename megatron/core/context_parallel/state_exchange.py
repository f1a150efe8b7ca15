"""Exchange of states between the segments of a sequence that context-parallel ranks hold, for recurrent layers.

A rank holds two segments, its two chunks of the zigzag split. They are computed at once, as entries of one batch. Every
rank gathers what all segments pass on, and combines what comes before its own segments.
"""

from __future__ import annotations

import torch

from megatron.core.context_parallel.partition import chunks_of, cut_sequence, to_sequence_order
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region


def to_segments(x: torch.Tensor, sequence_dim: int, batch_dim: int) -> torch.Tensor:
    """Put the two segments of a rank next to each other in the batch.

    Shapes: ``[s/cp, b, …] -> [s/(2 cp), 2b, …]`` for a sequence along dim 0 and a batch along dim 1.
    """
    return torch.cat(x.chunk(2, dim=sequence_dim), dim=batch_dim)


def from_segments(x: torch.Tensor, sequence_dim: int, batch_dim: int) -> torch.Tensor:
    """Invert `to_segments`.

    Shapes: ``[s/(2 cp), 2b, …] -> [s/cp, b, …]`` for a sequence along dim 0 and a batch along dim 1.
    """
    return torch.cat(x.chunk(2, dim=batch_dim), dim=sequence_dim)


def segments_of_whole(x: torch.Tensor, cp: Group) -> torch.Tensor:
    """Return the rank's segments of a tensor with all positions. Shapes: ``[b, s] -> [2b, s/(2 cp)]``."""
    return to_segments(cut_sequence(x, cp, dim=1), 1, 0)


def inputs_before_segments(
    x: torch.Tensor, document_starts: torch.Tensor | None, count: int, cp: Group
) -> torch.Tensor:
    """Return the ``count`` positions before each segment of this rank, 0 before the sequence and in other documents.

    Forward: all-gather of so many positions per segment, or of shorter segments; backward: reduce-scatter.

    Shapes: ``x: [2b, s/(2 cp), c], document_starts: [2b, s/(2 cp)]`` of bool ``-> [2b, count, c]``.
    """
    if document_starts is not None:
        x = torch.cat((x, document_starts[..., None].to(x.dtype)), dim=2)
    kept = min(count, x.shape[1])
    ends = _gathered(x[:, x.shape[1] - kept :], cp)
    # Several segments may be shorter than the positions together.
    num_before = -(-count // kept)
    ends = torch.cat((ends.new_zeros(num_before, *ends.shape[1:]), ends))
    before = [
        ends[number : number + num_before].transpose(0, 1).flatten(1, 2)[:, -count:]
        for number in chunks_of(cp.rank, cp.size)
    ]
    inputs = torch.cat(before)
    if document_starts is None:
        return inputs
    inputs, starts = inputs.tensor_split((-1,), dim=2)
    # A document that starts at a later position ends the document of this position.
    later = starts.flip(1).cumsum(dim=1).flip(1) - starts
    return inputs.masked_fill(later > 0, 0.0)


def states_before_segments(states: torch.Tensor, transitions: torch.Tensor, cp: Group) -> torch.Tensor:
    """Return the states before each segment of this rank.

    ``states`` are those after the segments, for a start from zero. A transition times the state before a segment is
    what the segment leaves of it. Forward: all-gather of states and transitions; backward: reduce-scatter.

    Shapes: ``states: [2b, n, rows, columns]``, ``transitions: [2b, n, rows, rows]``, or ``[2b, n, 1, 1]`` for a decay
    ``-> [2b, n, rows, columns]``.
    """
    both = _gathered(torch.cat((states.flatten(2), transitions.flatten(2)), dim=2), cp)
    batch, shapes = both.shape[1:3], (states.shape[2:], transitions.shape[2:])
    after, through = both.split_with_sizes([shape.numel() for shape in shapes], dim=3)
    state = states.new_zeros(*batch, *shapes[0])
    own, found = chunks_of(cp.rank, cp.size), []
    for number in range(own[-1] + 1):
        if number:
            transition = through[number - 1].view(*batch, *shapes[1])
            kept = transition * state if transition.shape[-1] == 1 else transition @ state
            state = kept + after[number - 1].view(state.shape)
        if number in own:
            found.append(state)
    return torch.cat(found)


def _gathered(x: torch.Tensor, cp: Group) -> torch.Tensor:
    """Gather all segments in the order of the sequence. Shapes: ``[2b, …] -> [2 cp, b, …]``."""
    gathered = gather_from_sequence_parallel_region(x.contiguous(), group=cp)
    return torch.unflatten(to_sequence_order(gathered, cp.size, dim=0), 0, (2 * cp.size, -1))
