"""Of the ranks whose figures differ, that one is to blame which no other has handed the difference to."""

from __future__ import annotations

import math

from megatron.training.fault_tolerance.step_replay import (
    RankTrace,
    describe_ranks,
    is_same,
    ranks_not_finite,
    ranks_that_differ,
)

CHUNKS, STAGES, COPIES = 2, 2, 3


def traces(spoiled: dict[tuple[int, int], float], gradients: dict[int, float]) -> list[RankTrace]:
    """Return the figures of two stages with three tensor-parallel ranks; ``spoiled`` names some by rank and chunk."""
    return [
        RankTrace(
            rank=rank,
            host="node",
            place={"pp": rank // COPIES, "dp": 0, "cp": 0, "tp": rank % COPIES},
            forward={(chunk, 0): spoiled.get((rank, chunk), 7.0) for chunk in range(CHUNKS)},
            gradient=gradients.get(rank, 3.0),
        )
        for rank in range(STAGES * COPIES)
    ]


GOOD = traces({}, {})


def blamed(spoiled: dict[tuple[int, int], float], gradients: dict[int, float]) -> list[int]:
    return [trace.rank for trace in ranks_that_differ(GOOD, traces(spoiled, gradients))]


def test_the_first_in_the_forward_pass_is_blamed() -> None:
    all_gradients = dict.fromkeys(range(6), math.nan)
    assert blamed({(4, 0): 8.0, (3, 1): 8.0, (5, 1): 8.0}, all_gradients) == [4]
    # Chunk 1 of the first stage comes after chunk 0 of the last.
    assert blamed({(1, 1): 8.0, (4, 1): 8.0}, all_gradients) == [1]
    assert blamed({(0, 0): math.nan, (2, 0): math.inf}, {}) == [0, 2]


def test_the_last_stage_is_blamed_where_gradients_alone_differ() -> None:
    assert blamed({}, {0: 4.0, 1: 4.0, 5: 4.0}) == [5]
    assert blamed({}, {2: 3.0001}) == []


def test_what_is_not_finite_is_found_without_another_computation() -> None:
    assert [trace.rank for trace in ranks_not_finite(traces({(5, 1): math.nan}, {}))] == [5]
    assert [trace.rank for trace in ranks_not_finite(traces({}, {1: math.inf}))] == [1]
    assert ranks_not_finite(GOOD) == []


def test_figures_that_differ_by_rounding_are_the_same() -> None:
    assert is_same(1.0, 1.0005)
    assert not is_same(1.0, 1.002)
    assert is_same(math.nan, math.inf)
    assert not is_same(math.nan, 1.0)
    assert is_same(None, None)
    assert not is_same(None, 1.0)


def test_ranks_are_named_with_their_hosts() -> None:
    assert describe_ranks(GOOD[:1]) == "rank 0 on node"
    assert describe_ranks(GOOD[1:3]) == "one of rank 1 on node, rank 2 on node, which cannot be told apart"
