"""GEMMs overlapped with the all-gather of their operand or the reduce-scatter of their result, chunk by chunk.

The number of chunks is the number of ranks, and chunks are passed around a ring: while one chunk is multiplied, the
next is sent. A rank sends the same volume as in a ring all-gather or reduce-scatter, (n - 1)/n of the whole. With more
than two ranks the order of summation differs from that of a collective. Wang et al. 2023,
https://doi.org/10.1145/3567955.3567959.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from megatron.core.collectives import RingExchange, start_ring_exchange
from megatron.core.ops import linear_into
from megatron.core.process_group import Group
from megatron.core.tensor_parallel import symmetric_memory
from megatron.core.tensor_parallel.comm_overlap_config import LinearOverlap

Multiply = Callable[[torch.Tensor, torch.Tensor], None]
"""Function that writes the GEMM of its second argument ``[n, b, in]`` into its first argument ``[n, b, out]``."""


def gather_and_multiply(
    x: torch.Tensor, multiply: Multiply, out_features: int, tp: Group, keeps: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multiply the group's parts along dim 0, each while the next part is received.

    The gathered input is returned too if it ``keeps`` it.

    Shapes: ``x: [s/tp, b, in] -> [s, b, out], [s, b, in]``.
    """
    part = x.contiguous()
    whole = (part.shape[0] * tp.size, *part.shape[1:-1])
    output = part.new_empty((*whole, out_features))
    gathered = part.new_empty((*whole, part.shape[-1])) if keeps else None
    outputs, places = output.chunk(tp.size), None if gathered is None else gathered.chunk(tp.size)
    for number in range(tp.size):
        source, following = (tp.rank - number) % tp.size, None
        if number < tp.size - 1:
            received = None if places is None else places[source - 1]
            following = start_ring_exchange(part, tp, received)
        multiply(outputs[source], part)
        if places is not None and number == 0:
            places[source].copy_(part)
        if following is not None:
            part = following.wait()
    return output, gathered


def multiply_and_scatter(x: torch.Tensor, multiply: Multiply, out_features: int, tp: Group) -> torch.Tensor:
    """Return this rank's part along dim 0 of the sum of the ranks' GEMMs, sending each part during the next GEMM.

    Shapes: ``x: [s, b, in] -> [s/tp, b, out]``.
    """
    parts = x.chunk(tp.size)
    arriving: RingExchange | None = None
    for number in range(tp.size):
        part = parts[(tp.rank - 1 - number) % tp.size]
        total = part.new_empty((*part.shape[:-1], out_features))
        multiply(total, part)
        if arriving is not None:
            total += arriving.wait()
        if number < tp.size - 1:
            arriving = start_ring_exchange(total, tp)
    return total


def gathered_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tp: Group,
    overlap: LinearOverlap,
    library: str = "auto",
    keeps: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute ``x @ weight.T + bias`` for the parts of all ranks, and return the gathered input if it ``keeps`` it.

    Shapes: ``x: [s/tp, b, in] -> [s, b, out], [s, b, in]``.
    """
    if overlap.uses_symmetric_memory:
        return symmetric_memory.gather_and_multiply(x, weight, bias, tp, keeps)
    multiply = partial(linear_into, weight=weight, bias=bias, library=library)
    return gather_and_multiply(x, multiply, weight.shape[0], tp, keeps)


def scattered_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    tp: Group,
    overlap: LinearOverlap,
    library: str = "auto",
) -> torch.Tensor:
    """Return this rank's part of the sum of ``x @ weight.T + bias`` over ``tp``; symmetric memory supports no bias.

    Shapes: ``x: [s, b, in] -> [s/tp, b, out]``.
    """
    if overlap.uses_symmetric_memory:
        assert bias is None, "a sum in symmetric memory has no place for it"
        return symmetric_memory.multiply_and_scatter(x, weight, tp)
    multiply = partial(linear_into, weight=weight, bias=bias, library=library)
    return multiply_and_scatter(x, multiply, weight.shape[0], tp)
