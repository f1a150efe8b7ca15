"""A communication in words and numbers, as it is told to other ranks and kept in files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class PendingWork(Protocol):
    """Be a communication that is under way."""

    def wait(self) -> object:
        """Wait until its tensors may be used."""
        ...


class DeviceMark(Protocol):
    """Be a place in the work that a device was given."""

    def query(self) -> bool:
        """Return whether the device has come past it; from any thread, and without a wait.

        Raises:
            RuntimeError: the device has failed.
        """
        ...


@dataclass(frozen=True)
class Communication:
    """Describe one communication of a rank.

    ``channel`` names who communicates, equally on all of them, and ``sequence`` counts its communications from 1.
    ``seconds`` is how long it took, None where its end is not known (yet); ``age_s`` how long ago it began.
    """

    channel: str
    sequence: int
    operation: str
    num_bytes: int
    shape: tuple[int, ...]
    place: str
    age_s: float
    seconds: float | None


def format_ranks(ranks: tuple[int, ...]) -> str:
    """Return ranks in few characters: ``0,1``, or ``0-1016/8`` for each eighth from 0 to 1016."""
    if len(ranks) > 2:
        step = ranks[1] - ranks[0]
        if step > 0 and ranks == tuple(range(ranks[0], ranks[-1] + 1, step)):
            return f"{ranks[0]}-{ranks[-1]}" + (f"/{step}" if step > 1 else "")
    return ",".join(map(str, ranks))


def parse_ranks(channel: str) -> tuple[int, ...]:
    """Return the ranks that the name of a channel says."""
    text = channel.rpartition("[")[2].rstrip("]")
    if "-" not in text:
        return tuple(int(rank) for rank in text.split(","))
    ends, _, step = text.partition("/")
    first, _, last = ends.partition("-")
    return tuple(range(int(first), int(last) + 1, int(step or 1)))
