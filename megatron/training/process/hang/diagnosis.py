"""From where the ranks stand to who holds them up: which rank waits for which others, and who waits for nobody."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron.core.flight.communication import Communication, parse_ranks
from megatron.training.process.hang.rank_state import RankState


@dataclass(frozen=True)
class Culprit:
    """Name a rank that others wait for, and what they wait for; None where nobody waits.

    ``waiting`` are those who wait for it directly. With ``has_entered`` it is in the communication itself.
    """

    rank: int
    waits_in: Communication | None
    waiting: tuple[int, ...]
    has_entered: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """Hold who waits for whom, and who is to blame.

    ``is_circle`` says that the culprits wait for each other: they communicate in different orders.
    """

    waits_for: Mapping[int, tuple[int, ...]]
    culprits: tuple[Culprit, ...]
    is_circle: bool = False


def diagnose(states: Mapping[int, RankState], silent: Collection[int] = ()) -> Diagnosis:
    """Return who waits for whom and who holds up the others; ``silent`` ranks are stopped or gone.

    A rank in a communication waits for those of its members that have begun fewer on that channel; where all have begun
    it, for the silent ones. A device in a communication waits for the members' devices alike. Culprits wait for nobody:
    they are silent or, where nobody is, compute, sleep or read.
    """
    waits_for: dict[int, tuple[int, ...]] = {}
    for rank, state in states.items():
        blocked = state.waits_in
        if blocked is None or rank in silent:
            waits_for[rank] = ()
            continue
        others = [other for other in parse_ranks(blocked.channel) if other != rank and other in states]
        late = [other for other in others if not _has_entered(states[other], state)]
        waits_for[rank] = tuple(late or [other for other in others if other in silent])
    sinks = [rank for rank in states if not waits_for[rank]]
    awaited = {other for others in waits_for.values() for other in others}
    # One in a communication that all have entered waits for the transport, as those do who wait for it.
    doing = [rank for rank in sinks if states[rank].waits_in is None or rank in silent]
    blamed = (
        [rank for rank in doing if rank in silent]
        or [rank for rank in doing if rank in awaited]
        or [rank for rank in doing if not states[rank].left]
        or sinks
    )
    is_circle = not blamed
    return Diagnosis(
        waits_for, tuple(_culprit(rank, states, waits_for) for rank in blamed or sorted(states)), is_circle
    )


def _culprit(rank: int, states: Mapping[int, RankState], waits_for: Mapping[int, tuple[int, ...]]) -> Culprit:
    waiting = tuple(other for other, awaited in waits_for.items() if rank in awaited)
    who_waits = states[waiting[0] if waiting else rank]
    return Culprit(rank, who_waits.waits_in, waiting, _has_entered(states[rank], who_waits))


def _has_entered(state: RankState, who_waits: RankState) -> bool:
    """Return whether a rank, or its device where one waits for it, is in what another one waits in."""
    awaited, by_device = who_waits.waits_in, who_waits.blocked is None
    return awaited is not None and state.num_entered(awaited.channel, by_device) >= awaited.sequence
