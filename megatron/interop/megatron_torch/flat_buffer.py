"""Where each parameter lies in the flat buffers of Megatron's distributed optimizer (``distrib_optim.pt``)."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

ALIGNMENT = 64
"""Elements at a multiple of which each parameter starts."""


@dataclass(frozen=True)
class FlatBuffer:
    """Hold the first element of every parameter, in the caller's order, and the number of elements of the buffer."""

    starts: tuple[int, ...]
    num_elements: int


def plan_flat_buffer(sizes: Sequence[int], bucket_size: int | None, alone: Collection[int] = ()) -> FlatBuffer:
    """Place parameters of ``sizes`` elements in reverse order, bucket after bucket.

    A bucket ends with the parameter that brings it to ``bucket_size`` elements (None: never); parameters listed in
    ``alone`` (a tied embedding in a pipeline) have one each. In the file the padding after a bucket is left out, and
    with it the alignment of what follows: a parameter starts at a multiple of 64 elements of its own bucket.
    """
    starts = [0] * len(sizes)
    bucket_start = end = 0
    is_empty = True
    for index in reversed(range(len(sizes))):
        aligned = -(-end // ALIGNMENT) * ALIGNMENT
        if index in alone and not is_empty:
            # Closed where this parameter would have begun: here, and here only, the padding stays.
            bucket_start, end = bucket_start + aligned, 0
            aligned = 0
        starts[index] = bucket_start + aligned
        end = aligned + sizes[index]
        is_empty = False
        if index in alone or (bucket_size is not None and end >= bucket_size):
            bucket_start, end = bucket_start + end, 0
            is_empty = True
    return FlatBuffer(tuple(starts), bucket_start + end)
