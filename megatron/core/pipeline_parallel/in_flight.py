"""How much waits for backward passes at once on a pipeline stage, read from the order of its pipeline schedule."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence

from megatron.core.pipeline_parallel.action import Action, Pass
from megatron.core.pipeline_parallel.schedules import SCHEDULES

_ROUNDS, _MOST_ROUNDS = 3, 64
"""After so many micro-batches for each stage a schedule only repeats itself, if rounds are equal and if not."""


# A search asks for the same lists thousands of times.
@functools.lru_cache(maxsize=1024)
def first_actions(
    name: str, pp: int, stage: int, num_microbatches: int, num_chunks: int, group_size: int | None
) -> tuple[Action, ...]:
    """Return a stage's actions of one step in a pipeline schedule; of many rounds of micro-batches only the first."""
    round_size = max(group_size or 0, pp)
    if num_microbatches % round_size == 0:
        num_microbatches = min(num_microbatches, _ROUNDS * round_size)
    elif num_microbatches > _MOST_ROUNDS * round_size:
        num_microbatches = _MOST_ROUNDS * round_size + num_microbatches % round_size
    return SCHEDULES[name](pp, stage, num_microbatches, num_chunks, group_size)


@functools.lru_cache(maxsize=1024)
def most_passes_in_flight(
    name: str, pp: int, stage: int, num_microbatches: int, num_chunks: int, group_size: int | None
) -> int:
    """Return how many forward passes of a stage's chunks wait for their backward passes at once, at most."""
    actions = first_actions(name, pp, stage, num_microbatches, num_chunks, group_size)
    return most_in_flight(actions, [1] * num_chunks)


def most_in_flight(actions: Iterable[Action], sizes: Sequence[int]) -> int:
    """Return the most that waits for backward passes at once, if a pass of each chunk keeps its one of ``sizes``."""
    in_flight = most = 0
    for kind, _, chunk in actions:
        if kind is Pass.FORWARD:
            in_flight += sizes[chunk]
            most = max(most, in_flight)
        elif kind in (Pass.BACKWARD, Pass.BACKWARD_INPUT):
            in_flight -= sizes[chunk]
    return most
