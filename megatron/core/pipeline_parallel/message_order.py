"""One order of all messages of a pipeline, which every rank keeps: no rank waits for another in a circle.

Where a rank's communication is a queue, as on a GPU whose links may not progress independently, a receive that is
posted before its message is due holds up what comes after it. With the sends and receives of all ranks in one common
order the first of them that is not finished is always next on both of its ends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from megatron.core.pipeline_parallel.action import Action, Pass, StagePlace
from megatron.core.pipeline_parallel.simulator import MessageRules, simulate


class Transfer(Enum):
    """Name what a rank does next with its links."""

    SEND = "send"
    RECEIVE_ACTIVATION = "receive_activation"
    RECEIVE_GRADIENT = "receive_gradient"


def message_orders(schedule: Sequence[Sequence[Action]], num_chunks: int = 1) -> tuple[tuple[Transfer, ...], ...]:
    """Return each rank's sends and receives in an order that is part of one order of all messages.

    Messages are ordered by when they leave in a simulation without waits for sends, the lower rank first. A rank takes
    a message for a pass that begins when it has left or later, so that a receive is never due before a send that it
    follows here.

    Raises:
        ScheduleError: the schedule cannot run at all.
    """
    pp = len(schedule)
    timeline = simulate(schedule, num_chunks, rules=MessageRules(rendezvous=False, sends_in_flight=None))
    messages = []
    for rank, run in enumerate(timeline.ranks):
        place = StagePlace(pp, rank, num_chunks)
        for action, end in zip(run.actions, run.ends):
            if place.sends(action.kind, action.chunk):
                is_gradient = action.kind is not Pass.FORWARD
                messages.append((end, rank, place.previous_rank if is_gradient else place.next_rank, is_gradient))
    orders: list[list[Transfer]] = [[] for _ in schedule]
    for _, sender, receiver, is_gradient in sorted(messages):
        orders[sender].append(Transfer.SEND)
        orders[receiver].append(Transfer.RECEIVE_GRADIENT if is_gradient else Transfer.RECEIVE_ACTIVATION)
    return tuple(map(tuple, orders))


class MessageOrders:
    """Give one rank of a pipeline its order for every list of actions that it runs; each is worked out once."""

    def __init__(self, place: StagePlace) -> None:
        self._place = place
        self._known: dict[tuple[Action, ...], tuple[Transfer, ...]] = {}

    def of(self, actions_of: Callable[[int], Sequence[Action]]) -> tuple[Transfer, ...]:
        """Return the order of the schedule that gives each rank of the pipeline its actions."""
        own = tuple(actions_of(self._place.rank))
        if own not in self._known:
            schedule = [actions_of(rank) for rank in range(self._place.pp)]
            self._known[own] = message_orders(schedule, self._place.num_chunks)[self._place.rank]
        return self._known[own]
