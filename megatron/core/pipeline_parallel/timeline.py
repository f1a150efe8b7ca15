"""Timeline of a pipeline: when each pass ran on each rank, simulated or measured, with bubble and peak memory."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron.core.errors import DataError
from megatron.core.pipeline_parallel.schedule_actions import Action, Pass


class Event(NamedTuple):
    """One pass of one micro-batch through one model chunk on a rank; times have the same unit on all ranks."""

    rank: int
    kind: Pass
    microbatch: int
    chunk: int
    start: float
    end: float


@dataclass(frozen=True)
class RankTimeline:
    """Actions of one rank in one iteration, in order, with the times of each."""

    actions: tuple[Action, ...] = ()
    starts: tuple[float, ...] = ()
    ends: tuple[float, ...] = ()

    @property
    def busy(self) -> float:
        return sum(self.ends) - sum(self.starts)

    @property
    def peak_activations(self) -> int:
        """Return the largest number of (micro-batch, chunk) pairs with saved activations at one time.

        A rank that runs no backward pass saves nothing beyond the current pass.
        """
        live = peak = 0
        for action in self.actions:
            if action.kind is Pass.FORWARD:
                live += 1
                peak = max(peak, live)
            elif action.kind.frees_activations:
                live -= 1
        return peak if live < peak or live == 0 else 1


@dataclass(frozen=True)
class Timeline:
    """Timelines of all ranks of a pipeline in one iteration."""

    ranks: tuple[RankTimeline, ...]

    @property
    def pipeline_size(self) -> int:
        return len(self.ranks)

    @property
    def num_chunks(self) -> int:
        """Return the number of model chunks per rank."""
        return 1 + max((action.chunk for rank in self.ranks for action in rank.actions), default=0)

    @property
    def num_microbatches(self) -> int:
        """Return the number of micro-batches."""
        return 1 + max((action.microbatch for rank in self.ranks for action in rank.actions), default=-1)

    @property
    def start(self) -> float:
        """Return the start of the first pass of any rank."""
        return min((rank.starts[0] for rank in self.ranks if rank.starts), default=0.0)

    @property
    def makespan(self) -> float:
        """Return the time from the start of the first pass to the end of the last pass, over all ranks."""
        return max((rank.ends[-1] for rank in self.ranks if rank.ends), default=0.0) - self.start

    def bubble(self, rank: int) -> float:
        """Return a rank's idle time, the rest of the makespan, divided by its busy time."""
        busy = self.ranks[rank].busy
        return self.makespan / busy - 1.0 if busy > 0 else 0.0

    @property
    def worst_bubble(self) -> float:
        """Return the largest bubble of any rank."""
        return max((self.bubble(rank) for rank in range(self.pipeline_size)), default=0.0)

    def events(self) -> Iterator[Event]:
        """Yield every pass of every rank."""
        for rank, timeline in enumerate(self.ranks):
            for action, start, end in zip(timeline.actions, timeline.starts, timeline.ends, strict=True):
                yield Event(rank, action.kind, action.microbatch, action.chunk, start, end)


def write_timeline(path: Path, timeline: Timeline) -> None:
    """Write a timeline as JSON: the number of ranks, and one row per event."""
    rows = [[event.rank, event.kind.value, *event[2:]] for event in timeline.events()]
    document = {"pipeline_model_parallel_size": timeline.pipeline_size, "fields": Event._fields, "events": rows}
    path.write_text(json.dumps(document) + "\n", encoding="utf-8")


def read_timeline(path: Path) -> Timeline:
    """Read a timeline that `write_timeline` wrote.

    Raises:
        DataError: the file is missing or is not a timeline.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        size = int(document["pipeline_model_parallel_size"])
        events = [_parse_event(row) for row in document["events"]]
        if size < 1 or any(not 0 <= event.rank < size for event in events):
            raise ValueError(f"an event has a rank outside 0..{size - 1}")
        return _timeline_of(events, size)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError) as error:
        reason = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"{path} is not a recorded timeline: {reason}") from error


def _parse_event(row: Sequence[Any]) -> Event:
    rank, kind, microbatch, chunk, start, end = row
    if not all(isinstance(number, int) and number >= 0 for number in (rank, microbatch, chunk)):
        raise ValueError(f"{row} does not begin with a rank, a pass, a micro-batch and a chunk")
    if not all(isinstance(time, int | float) for time in (start, end)) or not start <= end:
        raise ValueError(f"{row} does not end with a start and an end")
    return Event(rank, Pass(kind), microbatch, chunk, float(start), float(end))


def _timeline_of(events: Iterable[Event], pipeline_size: int) -> Timeline:
    ranks: list[list[Event]] = [[] for _ in range(pipeline_size)]
    for event in sorted(events, key=lambda event: (event.start, event.end)):
        ranks[event.rank].append(event)
    return Timeline(
        tuple(
            RankTimeline(
                tuple(Action(event.kind, event.microbatch, event.chunk) for event in rank),
                tuple(event.start for event in rank),
                tuple(event.end for event in rank),
            )
            for rank in ranks
        )
    )
