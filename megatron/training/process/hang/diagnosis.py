"""From where the ranks stand to who holds them up: which rank waits for which others, and who waits for nobody."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from megatron.core.flight_recorder import Communication, parse_ranks
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
    """Hold who waits for whom and in what, and who is to blame.

    ``is_circle`` says that the culprits wait for each other: they communicate in different orders.
    """

    waits_in: Mapping[int, Communication | None]
    waits_for: Mapping[int, tuple[int, ...]]
    culprits: tuple[Culprit, ...]
    is_circle: bool = False


def diagnose(states: Mapping[int, RankState], silent: Collection[int] = ()) -> Diagnosis:
    """Return who waits for whom and who holds up the others; ``silent`` ranks are stopped or gone.

    A rank in a communication waits for those of its members that have begun fewer on that channel; where all have begun
    it, for the silent ones. A device in a communication waits for the members' devices alike; one that may be in many
    is in the first that somebody is missing in. Culprits wait for nobody: they are silent or, where nobody is, compute,
    sleep or read.
    """
    waits_in: dict[int, Communication | None] = {}
    waits_for: dict[int, tuple[int, ...]] = {}
    for rank, state in states.items():
        found = [(each, *_missing(rank, each, states, silent)) for each in state.may_wait_in]
        # What all have entered may be over; it is taken where there is nothing else.
        chosen = next((item for item in found if item[1]), None) or next((item for item in found if item[2]), None)
        waits_in[rank], late, mute = chosen or (found[0] if found else (None, (), ()))
        waits_for[rank] = () if rank in silent else late or mute
    sinks = [rank for rank in states if not waits_for[rank]]
    awaited = {other for others in waits_for.values() for other in others}
    for rank in awaited.intersection(sinks):
        device = states[rank].on_device
        if states[rank].is_held_by_device and device is not None and not device.inside and device.ahead is not None:
            waits_in[rank] = None  # Nobody is missing beside, and its computation is not where the others are.
    # One in a communication that all have entered waits for the transport, as those do who wait for it.
    doing = [rank for rank in sinks if waits_in[rank] is None or rank in silent]
    blamed = (
        [rank for rank in doing if rank in silent]
        or [rank for rank in doing if rank in awaited]
        or [rank for rank in doing if not states[rank].left]
        or sinks
    )
    is_circle = not blamed
    culprits = (_culprit(rank, states, waits_in, waits_for) for rank in blamed or sorted(states))
    return Diagnosis(waits_in, waits_for, tuple(culprits), is_circle)


def _missing(
    rank: int, awaited: Communication, states: Mapping[int, RankState], silent: Collection[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return who has not entered what a rank may wait in, and who of the others is silent."""
    others = [other for other in parse_ranks(awaited.channel) if other != rank and other in states]
    late = tuple(other for other in others if not _has_entered(states[other], awaited, states[rank]))
    return late, tuple(other for other in others if other in silent)


def _culprit(
    rank: int,
    states: Mapping[int, RankState],
    waits_in: Mapping[int, Communication | None],
    waits_for: Mapping[int, tuple[int, ...]],
) -> Culprit:
    waiting = tuple(other for other, awaited in waits_for.items() if rank in awaited)
    who_waits = waiting[0] if waiting else rank
    awaited = waits_in[who_waits]
    has_entered = awaited is not None and _has_entered(states[rank], awaited, states[who_waits])
    return Culprit(rank, awaited, waiting, has_entered)


def _has_entered(state: RankState, awaited: Communication, who_waits: RankState) -> bool:
    """Return whether a rank, or its device where one waits for it, is in what another one waits in."""
    return state.num_entered(awaited.channel, who_waits.is_held_by_device) >= awaited.sequence
