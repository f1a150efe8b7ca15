"""Every schedule's messages have one order, which no rank has to leave and no device can break."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

import pytest

from megatron.core.pipeline_parallel.p2p_communication import MessageOrders, Transfer, message_orders
from megatron.core.pipeline_parallel.schedules import RECEIVES_AHEAD, Action, Pass, StagePlace, build_schedule
from megatron.verification.communication_replay import Call, Operation, communication_problems

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
    assert problem.startswith("4 of 4 ranks wait for ever: rank 0 in call 1 of 16, receive with rank 1")


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
