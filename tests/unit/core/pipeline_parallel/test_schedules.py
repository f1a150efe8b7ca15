"""Schedules: complete, in order, free of deadlock, and with the bubble and the memory that their papers promise."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from megatron.core.errors import ConfigurationError
from megatron.core.pipeline_parallel.schedules import (
    SCHEDULES,
    Action,
    Pass,
    build_schedule,
    default_schedule,
    microbatch_groups,
    schedule_problems,
)
from megatron.core.pipeline_parallel.simulator import Durations, MessageRules, simulate

EQUAL_TIMES = Durations(forward=1.0, backward=2.0, backward_input=1.0, backward_weight=1.0)


def layouts(name: str) -> Iterator[tuple[int, int]]:
    """Yield every number of micro-batches and of chunks that a schedule takes."""
    chunks = (1,) if name in ("1f1b", "zero-bubble") else range(1, 5)
    return itertools.product(range(1, 34), chunks)


def expected_passes(name: str) -> tuple[Pass, ...]:
    if name == "forward-only":
        return (Pass.FORWARD,)
    if name == "zero-bubble":
        return (Pass.FORWARD, Pass.BACKWARD_INPUT, Pass.BACKWARD_WEIGHT)
    return (Pass.FORWARD, Pass.BACKWARD)


@pytest.mark.default(7)
@pytest.mark.parametrize("pp", range(1, 9))
@pytest.mark.parametrize("name", SCHEDULES)
def test_every_pass_runs_once_in_order_and_no_rank_waits_for_ever(name: str, pp: int) -> None:
    for num_microbatches, num_chunks in layouts(name):
        schedule = build_schedule(name, pp, num_microbatches, num_chunks)
        passes = expected_passes(name)
        wanted = {
            Action(kind, microbatch, chunk)
            for kind in passes
            for microbatch in range(num_microbatches)
            for chunk in range(num_chunks)
        }
        for actions in schedule:
            position = {action: index for index, action in enumerate(actions)}
            assert len(actions) == len(position)
            assert position.keys() == wanted
            for (kind, *unit), index in position.items():
                order = passes.index(kind)
                assert order == 0 or position[Action(passes[order - 1], *unit)] < index
            # A chunk takes its micro-batches in order: a data loader that only goes forward is enough.
            for chunk in range(num_chunks):
                forwards = [a.microbatch for a in actions if a.kind is Pass.FORWARD and a.chunk == chunk]
                assert forwards == sorted(forwards)
        # Sends are rendezvous here; the simulator raises where ranks wait in a circle.
        timeline = simulate(schedule, num_chunks, EQUAL_TIMES)
        unlimited = simulate(schedule, num_chunks, EQUAL_TIMES, MessageRules(rendezvous=False, sends_in_flight=None))
        assert timeline.makespan == unlimited.makespan, "a limit on unfinished sends costs time"


@pytest.mark.parametrize("pp", range(1, 9))
def test_the_bubble_of_1f1b_is_p_minus_1_over_m(pp: int) -> None:
    for num_microbatches in range(1, 34):
        timeline = simulate(build_schedule("1f1b", pp, num_microbatches), 1, EQUAL_TIMES)
        for rank in range(pp):
            assert timeline.bubble(rank) == pytest.approx((pp - 1) / num_microbatches)
            assert timeline.ranks[rank].peak_activations <= pp - rank


@pytest.mark.default(23)
@pytest.mark.parametrize("num_chunks", [2, 3, 4])
@pytest.mark.parametrize("pp", range(1, 9))
def test_the_bubble_of_interleaving_is_divided_by_the_chunks(pp: int, num_chunks: int) -> None:
    for num_microbatches in range(pp, 34):
        schedule = build_schedule("interleaved", pp, num_microbatches, num_chunks)
        timeline = simulate(schedule, num_chunks, EQUAL_TIMES)
        largest = max(map(len, microbatch_groups(pp, num_microbatches)))
        for rank in range(pp):
            assert timeline.bubble(rank) == pytest.approx((pp - 1) / (num_chunks * num_microbatches))
            warmup = 2 * (pp - rank - 1) + (num_chunks - 1) * largest
            assert timeline.ranks[rank].peak_activations <= warmup + 1


@pytest.mark.parametrize("pp", range(2, 9))
def test_the_zero_bubble_schedule_leaves_a_third_of_the_bubble(pp: int) -> None:
    for num_microbatches in range(2 * pp, 34):
        timeline = simulate(build_schedule("zero-bubble", pp, num_microbatches), 1, EQUAL_TIMES)
        assert timeline.worst_bubble <= 0.45 * (pp - 1) / num_microbatches
        assert timeline.worst_bubble == pytest.approx((pp - 1) / (3 * num_microbatches))
        assert max(rank.peak_activations for rank in timeline.ranks) <= pp


def test_groups_are_nearly_equal_and_never_below_the_pipeline() -> None:
    for pp in range(1, 9):
        for num_microbatches in range(1, 60):
            for group_size in (None, pp, pp + 3):
                groups = microbatch_groups(pp, num_microbatches, group_size)
                assert [m for group in groups for m in group] == list(range(num_microbatches))
                sizes = [len(group) for group in groups]
                assert max(sizes) - min(sizes) <= 1
                assert min(sizes) >= min(pp, num_microbatches)
                if num_microbatches % pp == 0 and group_size in (None, pp):
                    assert set(sizes) == {pp}


@pytest.mark.parametrize("pp", [2, 3, 5])
def test_larger_groups_run_too(pp: int) -> None:
    for num_microbatches in range(1, 34):
        schedule = build_schedule("interleaved", pp, num_microbatches, 3, pp + 2)
        assert simulate(schedule, 3).makespan > 0


def test_the_first_rank_of_a_small_pipeline_reads_as_in_the_paper() -> None:
    text = " ".join(f"{action.kind.value[0].upper()}{action.microbatch}" for action in build_schedule("1f1b", 4, 6)[0])
    assert text == "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5"
    short = {Pass.FORWARD: "F", Pass.BACKWARD_INPUT: "B", Pass.BACKWARD_WEIGHT: "W"}
    text = " ".join(f"{short[action.kind]}{action.microbatch}" for action in build_schedule("zero-bubble", 3, 4)[1])
    assert text == "F0 F1 B0 F2 B1 W0 F3 B2 W1 B3 W2 W3"


def test_the_default_follows_the_layout() -> None:
    assert [default_schedule(*shape) for shape in ((1, 1), (4, 1), (4, 2))] == ["no-pipelining", "1f1b", "interleaved"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("gpipe", 4, 8), "use one of forward-only, no-pipelining, 1f1b"),
        (("1f1b", 4, 0), "raise --global-batch-size"),
        (("zero-bubble", 4, 8, 2), "use the interleaved schedule or --num-virtual-stages-per-pipeline-rank 1"),
        (("interleaved", 4, 8, 2, 3), "use 4 or more"),
    ],
)
def test_what_cannot_run_is_refused_with_what_would(arguments: tuple, words: str) -> None:
    assert [words in problem for problem in schedule_problems(*arguments)] == [True]
    with pytest.raises(ConfigurationError, match=words):
        build_schedule(*arguments)
