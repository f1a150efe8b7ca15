"""The most passes in flight are those of a schedule's own order, whatever the groups of micro-batches."""

from __future__ import annotations

import itertools

import pytest

from megatron.core.pipeline_parallel.schedules import (
    SCHEDULES,
    Pass,
    first_actions,
    most_in_flight,
    most_passes_in_flight,
    schedule_problems,
)


def counted(name: str, stage: int, pp: int, microbatches: int, chunks: int, group: int | None) -> int:
    """Return the most pairs of micro-batch and chunk that a whole step has between forward and backward."""
    open_passes: set[tuple[int, int]] = set()
    most = 0
    for kind, microbatch, chunk in SCHEDULES[name](pp, stage, microbatches, chunks, group):
        if kind is Pass.FORWARD:
            open_passes.add((microbatch, chunk))
        elif kind is not Pass.BACKWARD_WEIGHT:
            open_passes.remove((microbatch, chunk))
        most = max(most, len(open_passes))
    return most


def test_passes_in_flight_are_those_of_the_schedule() -> None:
    grid = itertools.product(
        ("1f1b", "interleaved", "zero-bubble", "no-pipelining"),
        (1, 2, 4),
        (1, 3, 6, 7, 16, 50),
        (1, 2, 4),
        (None, 4, 8),
    )
    num_compared = 0
    for name, pp, microbatches, chunks, group in grid:
        if schedule_problems(name, pp, microbatches, chunks, group):
            continue
        for stage in range(pp):
            most = most_passes_in_flight(name, pp, stage, microbatches, chunks, group)
            assert most == counted(name, stage, pp, microbatches, chunks, group)
            num_compared += 1
    assert num_compared > 500


@pytest.mark.parametrize(
    ("pp", "microbatches", "chunks", "group", "most"), [(4, 6, 2, None, 12), (4, 7, 4, None, 28), (4, 16, 2, 8, 15)]
)
def test_groups_are_as_large_as_the_schedule_makes_them(
    pp: int, microbatches: int, chunks: int, group: int | None, most: int
) -> None:
    assert most_passes_in_flight("interleaved", pp, 0, microbatches, chunks, group) == most


def test_chunks_of_unlike_sizes_are_counted_each() -> None:
    actions = first_actions("interleaved", 2, 0, 4, 2, None)
    # At first three of the first chunk and two of the last, and then one of the last for another of the first.
    assert most_in_flight(actions, [1, 1]) == 5
    assert most_in_flight(actions, [10, 1]) == 41
    assert most_in_flight(actions, [0, 1]) == 2
