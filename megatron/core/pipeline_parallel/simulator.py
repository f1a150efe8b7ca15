"""Simulate a pipeline schedule on all ranks: it detects deadlocks, and computes times from pass durations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

from megatron.core.errors import MegatronError
from megatron.core.pipeline_parallel.schedule_actions import RECEIVES_AHEAD, Action, Pass, StagePlace, sends_in_flight
from megatron.core.pipeline_parallel.timeline import RankTimeline, Timeline


class ScheduleError(MegatronError):
    """Action lists that cannot run, because they deadlock or are inconsistent."""


@dataclass(frozen=True, kw_only=True)
class Durations:
    """Duration of each pass of one chunk and of the transfer of one message, in any unit.

    ``output_weight`` is a part of ``backward``: a backward pass that defers it is shorter by this amount.
    """

    forward: float = 1.0
    backward: float = 2.0
    backward_input: float = 1.0
    backward_weight: float = 1.0
    output_weight: float = 0.0
    transfer: float = 0.0

    def by_pass(self) -> Mapping[Pass, float]:
        """Return the duration of each pass."""
        return {
            Pass.FORWARD: self.forward,
            Pass.BACKWARD: self.backward,
            Pass.BACKWARD_INPUT: self.backward_input,
            Pass.BACKWARD_WEIGHT: self.backward_weight,
            Pass.OUTPUT_WEIGHT: self.output_weight,
        }


@dataclass(frozen=True, kw_only=True)
class MessageRules:
    """Semantics of messages on a link, which connects two ranks in one direction and preserves their order.

    With ``rendezvous`` a transfer starts when the receiver has posted the receive, otherwise at once. A receiver posts
    receives for the next ``receives_ahead`` messages (at least 1) after the last one that it took. A sender with more
    than ``sends_in_flight`` transfers in flight on the link waits for the oldest (``None``: it never waits; 0: every
    send blocks; "enough": the result of the function `sends_in_flight`).
    """

    rendezvous: bool = True
    receives_ahead: int = RECEIVES_AHEAD
    sends_in_flight: int | Literal["enough"] | None = "enough"


class _Link:
    """State of one link: keys and times of its messages, in order."""

    def __init__(self, rules: MessageRules, transfer: float) -> None:
        self.receives_ahead = rules.receives_ahead if rules.rendezvous else None
        self.transfer = transfer
        self.keys: list[int] = []
        self.sent_times: list[float] = []
        self.taken_times: list[float] = []
        self.waiting: _Rank | None = None

    def arrival(self, index: int) -> float | None:
        """Return the arrival time of a message, or None while it is unknown."""
        if index >= len(self.sent_times):
            return None
        begin = self.sent_times[index]
        if self.receives_ahead is not None and index >= self.receives_ahead:
            posted_by = index - self.receives_ahead
            if posted_by >= len(self.taken_times):
                return None
            begin = max(begin, self.taken_times[posted_by])
        return begin + self.transfer


class _Rank:
    """Simulation of one rank's actions, as far as the messages of the other ranks allow."""

    def __init__(
        self, place: StagePlace, actions: Sequence[Action], links: Sequence[_Link], sends_in_flight: int | None
    ) -> None:
        self.place = place
        self.actions = tuple(actions)
        self.starts: list[float] = []
        self.ends: list[float] = []
        # A single rank passes activations to itself, without messages.
        self.sends_in_flight = sends_in_flight if place.pp > 1 else None
        self.clock = 0.0
        self.unfinished: tuple[_Link, int] | None = None
        self._live: set[int] = set()
        self._deferred: set[int] = set()
        self._late = {a.microbatch * place.num_chunks + a.chunk for a in actions if a.kind is Pass.OUTPUT_WEIGHT}
        self._left: set[int] = set()
        # Links 0..pp-1 carry activations from a rank to the next one; the others carry gradients to the previous rank.
        pp, chunks = place.pp, range(place.num_chunks)
        into = {kind: links[place.previous_rank if kind is Pass.FORWARD else pp + place.rank] for kind in Pass}
        out = {kind: links[place.rank if kind is Pass.FORWARD else pp + place.previous_rank] for kind in Pass}
        self._sources = {kind: [into[kind] if place.receives(kind, c) else None for c in chunks] for kind in Pass}
        self._targets = {kind: [out[kind] if place.sends(kind, c) else None for c in chunks] for kind in Pass}
        # The receiver identifies a message by its own chunk, which differs if the message goes from the last rank to
        # the first.
        self._chunk_step = dict.fromkeys(Pass, 0)
        if place.rank == pp - 1:
            self._chunk_step[Pass.FORWARD] = 1
        if place.rank == 0:
            self._chunk_step[Pass.BACKWARD] = self._chunk_step[Pass.BACKWARD_INPUT] = -1

    def run(self, durations: Mapping[Pass, float]) -> list[_Rank]:
        """Continue until the list ends or blocks, and return the ranks that this has unblocked."""
        awake: list[_Rank] = []
        num_chunks, sends_in_flight = self.place.num_chunks, self.sends_in_flight
        for position in range(len(self.ends), len(self.actions)):
            if self.unfinished is not None and not self._finish_sends():
                return awake
            action = self.actions[position]
            kind, microbatch, chunk = action
            key = microbatch * num_chunks + chunk
            start = self.clock
            source = self._sources[kind][chunk]
            if source is not None:
                arrival = source.arrival(len(source.taken_times))
                if arrival is None:
                    source.waiting = self
                    return awake
                if arrival > start:
                    start = arrival
                if source.keys[len(source.taken_times)] != key:
                    self._refuse_message(action, source)
                source.taken_times.append(start)
                if source.waiting is not None:
                    awake.append(source.waiting)
                    source.waiting = None
            self._check_order(action, key)
            self.starts.append(start)
            is_shorter = kind is Pass.BACKWARD and key in self._late
            self.clock = end = start + durations[kind] - (durations[Pass.OUTPUT_WEIGHT] if is_shorter else 0.0)
            self.ends.append(end)
            target = self._targets[kind][chunk]
            if target is not None:
                target.keys.append(key + self._chunk_step[kind])
                target.sent_times.append(end)
                if target.waiting is not None:
                    awake.append(target.waiting)
                    target.waiting = None
                if sends_in_flight is not None and len(target.keys) > sends_in_flight:
                    self.unfinished = target, len(target.keys) - 1 - sends_in_flight
        if self.unfinished is not None:
            self._finish_sends()
        return awake

    def _finish_sends(self) -> bool:
        """Try to complete the send that blocks this rank, and return whether its end is known."""
        assert self.unfinished is not None
        link, index = self.unfinished
        arrival = link.arrival(index)
        if arrival is None:
            link.waiting = self
            return False
        self.clock = max(self.clock, arrival)
        self.unfinished = None
        return True

    def _check_order(self, action: Action, key: int) -> None:
        kind = action.kind
        if kind is Pass.FORWARD:
            self._live.add(key)
            return
        held = {Pass.BACKWARD_WEIGHT: self._deferred, Pass.OUTPUT_WEIGHT: self._left}.get(kind, self._live)
        if key not in held:
            raise ScheduleError(f"{self.describe(action)} is out of order or is repeated")
        held.remove(key)
        if kind is Pass.BACKWARD_INPUT:
            self._deferred.add(key)
        elif kind is Pass.BACKWARD and key in self._late:
            self._left.add(key)

    def _refuse_message(self, action: Action, source: _Link) -> NoReturn:
        microbatch, chunk = divmod(source.keys[len(source.taken_times)], self.place.num_chunks)
        raise ScheduleError(
            f"{self.describe(action)} receives the message for micro-batch {microbatch}, chunk {chunk}: sender and "
            "receiver process the micro-batches in different orders"
        )

    def describe(self, action: Action) -> str:
        """Format an action for errors."""
        words = action.kind.value.replace("_", " ")
        return f"rank {self.place.rank}: {words} of micro-batch {action.microbatch}, chunk {action.chunk}"

    def describe_wait(self) -> str | None:
        """Describe what this rank waits for; return None if it has run all its actions."""
        if self.unfinished is not None:
            return f"rank {self.place.rank} waits to send after {len(self.ends)} actions"
        if len(self.ends) < len(self.actions):
            return f"{self.describe(self.actions[len(self.ends)])} waits for its message"
        return None


def simulate(
    schedule: Sequence[Sequence[Action]],
    num_chunks: int = 1,
    durations: Durations | Sequence[Durations] | None = None,
    rules: MessageRules | None = None,
) -> Timeline:
    """Compute when every rank runs its actions, each as early as its messages and its order allow.

    ``schedule`` has the action list of every rank. ``durations`` may be given per rank; messages then take as long as
    the first rank's. The simulation takes linear time in the number of actions: a rank runs until it blocks, and the
    event that it waits for wakes it up.

    Raises:
        ScheduleError: the ranks deadlock (the message names what every one of them waits for), a message is not the one
            that its receiver expects, or a backward pass has no forward pass.
    """
    rules = rules or MessageRules()
    several = durations if isinstance(durations, Sequence) else [durations or Durations()] * len(schedule)
    assert rules.receives_ahead >= 1, "a rank that waits for a message has posted its receive"
    pp = len(schedule)
    links = [_Link(rules, several[0].transfer if pp > 1 else 0.0) for _ in range(2 * pp)]
    allowed = sends_in_flight(pp, schedule[0]) if rules.sends_in_flight == "enough" else rules.sends_in_flight
    ranks = [_Rank(StagePlace(pp, rank, num_chunks), actions, links, allowed) for rank, actions in enumerate(schedule)]
    times = [each.by_pass() for each in several]
    to_run = ranks[::-1]
    while to_run:
        rank = to_run.pop()
        to_run += rank.run(times[rank.place.rank])
    waits = [wait for wait in (rank.describe_wait() for rank in ranks) if wait is not None]
    if waits:
        raise ScheduleError(f"{len(waits)} of {pp} ranks wait for each other: {'; '.join(waits)}")
    return Timeline(tuple(RankTimeline(rank.actions, tuple(rank.starts), tuple(rank.ends)) for rank in ranks))
