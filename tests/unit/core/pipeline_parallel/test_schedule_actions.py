"""Schedules: complete, free of deadlock, one order of messages, and the bubble and memory of their papers."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import pytest

from megatron.core.errors import ConfigurationError
from megatron.core.pipeline_parallel.p2p_communication import MessageOrders, Transfer, message_orders
from megatron.core.pipeline_parallel.schedule_actions import (
    RECEIVES_AHEAD,
    SCHEDULES,
    Action,
    Pass,
    StagePlace,
    build_schedule,
    default_schedule,
    first_actions,
    microbatch_groups,
    most_in_flight,
    most_passes_in_flight,
    schedule_problems,
)
from megatron.core.pipeline_parallel.simulator import Durations, MessageRules, simulate
from megatron.verification.communication_replay import Call, Operation, communication_problems

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


RECEIVES = {False: Transfer.RECEIVE_ACTIVATION, True: Transfer.RECEIVE_GRADIENT}
CASES = [
    *((name, pp, m, 1, None) for name in ("1f1b", "zero-bubble") for pp in range(2, 7) for m in (1, 3, 8, 13)),
    *(("forward-only", pp, 5, chunks, None) for pp in (2, 3, 5) for chunks in (1, 2)),
    *(("interleaved", pp, m, chunks, None) for pp in (2, 3, 4, 5) for m in (1, 4, 7) for chunks in (2, 3)),
    # A group that is larger than the pipeline leaves its surplus between the last rank and the first.
    *(("interleaved", pp, 14, 2, group) for pp in (2, 3, 4) for group in (pp + 1, 7)),
]


def in_executors_order(actions: Sequence[Action], order: Sequence[Transfer], place: StagePlace) -> list[Transfer]:
    """Return what a rank does with its links, with a receive posted before a send that it precedes, or at need."""
    left, done = list(order), []
    posted, taken = Counter[Transfer](), Counter[Transfer]()

    def post() -> None:
        posted[left[0]] += 1
        done.append(left.pop(0))

    for kind, _, chunk in actions:
        if place.receives(kind, chunk):
            receive = RECEIVES[kind is not Pass.FORWARD]
            while posted[receive] == taken[receive]:
                assert left[0] is not Transfer.SEND, "a send that has not been computed is in the way"
                post()
            taken[receive] += 1
        if place.sends(kind, chunk):
            while left[0] is not Transfer.SEND:
                post()
            done.append(left.pop(0))
    assert left == []
    assert posted == taken
    return done


def ahead(actions: Sequence[Action], place: StagePlace) -> list[Transfer]:
    """Return what a rank does that posts receives before their messages are due."""
    expected = Counter(RECEIVES[kind is not Pass.FORWARD] for kind, _, chunk in actions if place.receives(kind, chunk))
    done = [receive for receive in expected for _ in range(min(RECEIVES_AHEAD, expected[receive]))]
    posted = Counter(done)
    for kind, _, chunk in actions:
        receive = RECEIVES[kind is not Pass.FORWARD]
        if place.receives(kind, chunk) and posted[receive] < expected[receive]:
            posted[receive] += 1
            done.append(receive)
        if place.sends(kind, chunk):
            done.append(Transfer.SEND)
    return done


def as_log(actions: Sequence[Action], transfers: Sequence[Transfer], place: StagePlace) -> list[Operation]:
    """Return a rank's transfers as calls, each direction of a pair on a communicator of its own."""
    sends = iter([action.kind is not Pass.FORWARD for action in actions if place.sends(action.kind, action.chunk)])
    log: list[Operation] = []
    for transfer in transfers:
        is_send = transfer is Transfer.SEND
        is_gradient = next(sends) if is_send else transfer is Transfer.RECEIVE_GRADIENT
        peer = place.next_rank if is_send is not is_gradient else place.previous_rank
        log.append((Call("send" if is_send else "receive", f"gradient {is_gradient}", (), peer=peer),))
    return log


@pytest.mark.parametrize(("name", "pp", "num_microbatches", "num_chunks", "group"), CASES)
def test_every_schedule_runs_where_each_operation_holds_its_rank(
    name: str, pp: int, num_microbatches: int, num_chunks: int, group: int | None
) -> None:
    schedule = build_schedule(name, pp, num_microbatches, num_chunks, group)
    logs = []
    for rank, order in enumerate(message_orders(schedule, num_chunks)):
        place = StagePlace(pp, rank, num_chunks)
        logs.append(as_log(schedule[rank], in_executors_order(schedule[rank], order, place), place))
    assert communication_problems(logs) == []


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_receives_that_are_posted_ahead_hang_at_the_first_use_of_a_link(name: str) -> None:
    schedule = build_schedule(name, 4, 8)
    places = [StagePlace(4, rank) for rank in range(4)]
    logs = [as_log(actions, ahead(actions, place), place) for actions, place in zip(schedule, places)]
    (problem,) = communication_problems(logs)
    assert problem.startswith("4 of 4 ranks wait forever: rank 0 in call 1 of 16, receive with rank 1")


def test_an_order_is_worked_out_once_for_each_list_of_actions() -> None:
    asked: list[tuple[int, int]] = []

    def actions_of(rank: int, num_microbatches: int) -> Sequence[Action]:
        asked.append((rank, num_microbatches))
        return build_schedule("1f1b", 3, num_microbatches)[rank]

    orders = MessageOrders(StagePlace(3, 1))
    first = orders.of(partial(actions_of, num_microbatches=2))
    assert asked == [(1, 2), (0, 2), (1, 2), (2, 2)]
    assert orders.of(partial(actions_of, num_microbatches=2)) is first
    assert len(orders.of(partial(actions_of, num_microbatches=3))) == len(first) + 4
    assert asked[4:] == [(1, 2), (1, 3), (0, 3), (1, 3), (2, 3)]
