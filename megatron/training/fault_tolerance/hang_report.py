"""Hang report: the rank that blocks the others, and its operation, as text and as JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.errors import InputError
from megatron.core.flight_recorder import Communication, format_ranks, parse_ranks
from megatron.training.fault_tolerance.rank_state import RankState, at_work, is_waiting, short_path

HANG_PREFIX = "HANG: "
"""Start of the lines that report a hang."""


@dataclass(frozen=True)
class Culprit:
    """Root cause of a hang: a rank that blocks others, and the communication that they wait in; None if no rank waits.

    ``waiting`` are the ranks that wait for it directly. ``has_entered`` is set if it has entered the communication
    itself.
    """

    rank: int
    waits_in: Communication | None
    waiting: tuple[int, ...]
    has_entered: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """Wait-for graph of the ranks, and the root causes.

    ``is_circle`` is set for a deadlock: the root-cause ranks wait for each other because they communicate in different
    orders.
    """

    waits_in: Mapping[int, Communication | None]
    waits_for: Mapping[int, tuple[int, ...]]
    culprits: tuple[Culprit, ...]
    is_circle: bool = False


def diagnose(states: Mapping[int, RankState], silent: Collection[int] = ()) -> Diagnosis:
    """Build the wait-for graph and find the root causes; ``silent`` ranks are stopped or gone.

    A rank in a communication waits for the members that have entered fewer communications on that channel. If all
    members have entered, it waits for the silent ones. A device in a communication waits for the devices of the members
    in the same way. If it may be in several, it is in the first one that some member has not entered. A root cause
    waits for no rank: it is silent or, if no rank is silent, it computes, sleeps or reads.
    """
    waits_in: dict[int, Communication | None] = {}
    waits_for: dict[int, tuple[int, ...]] = {}
    for rank, state in states.items():
        found = [(each, *_missing(rank, each, states, silent)) for each in state.may_wait_in]
        # A communication that all members have entered may be over; it is chosen only if there is no other.
        chosen = next((item for item in found if item[1]), None) or next((item for item in found if item[2]), None)
        waits_in[rank], late, mute = chosen or (found[0] if found else (None, (), ()))
        waits_for[rank] = () if rank in silent else late or mute
    sinks = [rank for rank in states if not waits_for[rank]]
    awaited = {other for others in waits_for.values() for other in others}
    for rank in awaited.intersection(sinks):
        device = states[rank].on_device
        if states[rank].is_held_by_device and device is not None and not device.inside and device.ahead is not None:
            # No member is missing there, and the device computes before it reaches the operation that the others wait
            # in.
            waits_in[rank] = None
    # A rank in a communication that all have entered waits for the transport, like the ranks that wait for it.
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
    """Return the members that have not entered a communication, and the silent ones among the others."""
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
    """Return whether a rank, or its device if a device waits, has entered another rank's communication."""
    return state.num_entered(awaited.channel, who_waits.is_held_by_device) >= awaited.sequence


FORMAT = "megatron hang report 1"
_MOST_RANKS = 64
_MOST_STACKS = 8
_MOST_FRAMES = 16


class HangReportError(InputError):
    """The file is not a hang report."""


@dataclasses.dataclass(frozen=True)
class HangReport:
    """Diagnosis and data of a hang.

    ``idle_s`` is the time that each rank made no progress, ``processes`` the state of each process according to the
    operating system, and ``answers`` the replies of the ranks that responded.
    """

    limit_s: float
    states: Mapping[int, RankState]
    idle_s: Mapping[int, float]
    processes: Mapping[int, str]
    answers: Mapping[int, Mapping[str, Any]]
    diagnosis: Diagnosis
    time: str = dataclasses.field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))

    def culprit_lines(self) -> list[str]:
        """Return one line per root cause: rank, group, operation and source line."""
        return [self._name(culprit) for culprit in self.diagnosis.culprits[:_MOST_RANKS]]

    def headline(self) -> str:
        """Return a line with the time without progress and the number of completed iterations."""
        longest = max(self.idle_s.values(), default=0.0)
        iteration = max((state.iteration for state in self.states.values()), default=0)
        return f"{HANG_PREFIX}there was no progress for {longest:.1f} s; {iteration} iterations are done"

    def to_text(self, path: str = "") -> str:
        """Format the report for a terminal, with the root causes last; ``path`` is the file of the report."""
        lines = [self.headline(), *self.table()]
        for rank in self._ranks_with_stacks():
            for stack in self.answers[rank].get("stacks", ()):
                if stack["thread"] == "MainThread" or not is_waiting(stack):
                    lines.append(f"rank {rank}, thread {stack['thread']}:")
                    lines += [f"    {frame}" for frame in stack["frames"][-_MOST_FRAMES:]]
            if self.answers[rank].get("reading"):
                lines.append(f"rank {rank} reads samples {self.answers[rank]['reading']}")
        if path:
            lines.append(f"report: {path}; megatron hang-report draws it")
        return "\n".join([*lines, *(f"{HANG_PREFIX}{line}" for line in self.culprit_lines())])

    def table(self) -> list[str]:
        """Format one line per rank: its process, phase and communication, and the ranks that it waits for."""
        rows = [("rank", "process", "idle", "phase", "waits in", "for")]
        for rank, state in sorted(self.states.items())[:_MOST_RANKS]:
            awaited = self.diagnosis.waits_for.get(rank, ())
            communication = self.diagnosis.waits_in.get(rank)
            waits_in = "" if communication is None else describe_communication(communication)
            if waits_in and state.is_held_by_device:
                waits_in += " on its device"
            process = f"{self.processes.get(rank, '')} ({state.process.host}:{state.process.pid})"
            phase = "left" if state.left else f"{state.phase}, iteration {state.iteration + 1}"
            whom = f"rank {format_ranks(awaited)}" if awaited else "-"
            rows.append((str(rank), process, f"{self.idle_s.get(rank, 0.0):.1f} s", phase, waits_in or "-", whom))
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in rows]
        left_out = len(self.states) - _MOST_RANKS
        return lines + ([f"and {left_out} more ranks"] if left_out > 0 else [])

    def to_dict(self) -> dict[str, Any]:
        """Convert the report to JSON-ready values."""
        return {
            "format": FORMAT,
            "time": self.time,
            "limit_s": self.limit_s,
            "culprits": [dataclasses.asdict(culprit) for culprit in self.diagnosis.culprits],
            "is_circle": self.diagnosis.is_circle,
            "summary": self.culprit_lines(),
            "ranks": [
                {
                    **state.to_dict(),
                    "idle_s": self.idle_s.get(rank, 0.0),
                    "process_state": self.processes.get(rank, ""),
                    "waits_in": None if waits_in is None else dataclasses.asdict(waits_in),
                    "waits_for": list(self.diagnosis.waits_for.get(rank, ())),
                    **self.answers.get(rank, {}),
                }
                for rank, state in sorted(self.states.items())
                for waits_in in (self.diagnosis.waits_in.get(rank),)
            ],
        }

    def write(self, folder: Path) -> Path | None:
        """Write the JSON into a folder and return the file, or None if it cannot be written."""
        path = folder / f"hang-{time.strftime('%Y%m%d-%H%M%S')}.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            unfinished = path.with_name(f".{path.name}.{os.getpid()}")
            unfinished.write_text(json.dumps(self.to_dict(), indent=1))
            unfinished.replace(path)
        except OSError:
            return None
        return path

    def _ranks_with_stacks(self) -> list[int]:
        blamed = [culprit.rank for culprit in self.diagnosis.culprits]
        ranks = dict.fromkeys([*sorted(self.answers), *blamed])
        chosen = [rank for rank in ranks if rank in self.answers]
        if len(chosen) > _MOST_STACKS:
            chosen = [rank for rank in chosen if rank in blamed][:_MOST_STACKS]
        return sorted(chosen, key=lambda rank: rank in blamed)

    def _name(self, culprit: Culprit) -> str:
        rank = culprit.rank
        state, process = self.states[rank], self.processes.get(rank, "")
        who = f"rank {rank} on {state.process.host} (pid {state.process.pid})"
        answer = self.answers.get(rank, {})
        place = at_work(answer)
        if state.left:
            doing = "has ended"
        elif answer and not answer.get("is_locked"):
            doing = f"is in phase {state.phase} at {place}" if place else f"is in phase {state.phase}"
        elif process in ("", "alive"):
            doing = f"does not answer{f' at {place}' if place else ''}, last heard of in phase {state.phase},"
        else:
            doing = f"is {process}, last heard of in phase {state.phase},"
        waits_in = self.diagnosis.waits_in.get(rank)
        doing += _device_words(state, waits_in)
        if answer.get("reading"):
            doing += f", reading samples {answer['reading']}"
        if self.diagnosis.is_circle and waits_in is not None:
            awaited = format_ranks(self.diagnosis.waits_for.get(rank, ()))
            return (
                f"{who} waits in {describe_communication(waits_in)} for rank {awaited}, which waits in a different "
                "communication"
            )
        if culprit.waits_in is None:
            return f"{who} {doing}"
        has = "is inside" if culprit.has_entered else "has not entered"
        waiting = f", where rank {format_ranks(culprit.waiting)} waits" if culprit.waiting else ""
        return f"{who} {doing} and {has} {describe_communication(culprit.waits_in)}{waiting}"


def _device_words(state: RankState, waits_in: Communication | None) -> str:
    """Describe the activity of a device that waits in no communication; empty for other ranks."""
    if state.on_device is None or waits_in is not None:
        return ""
    if state.on_device.ahead is None:
        return ", with a device that has finished its queued communication,"
    return f", with a device that is still running work before {describe_communication(state.on_device.ahead)},"


def describe_communication(communication: Communication) -> str:
    """Describe a communication in one phrase: operation, number, group, bytes and source line."""
    size = f", {communication.num_bytes} bytes" if communication.num_bytes else ""
    file, _, line = communication.place.rpartition(":")
    return (
        f"{communication.operation} #{communication.sequence} of {communication.channel}{size} "
        f"({short_path(file)}:{line})"
    )


def read_hang_report(path: Path) -> HangReport:
    """Read a file that `HangReport.write` has written.

    Raises:
        HangReportError: it cannot be read, or is not a hang report.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise HangReportError(f"{path} is not a hang report; pass a hang-*.json of a run's --save folder")
        ranks = {int(item["rank"]): item for item in values["ranks"]}
        culprits = tuple(
            Culprit(
                item["rank"],
                None if item["waits_in"] is None else Communication(**item["waits_in"]),
                tuple(item["waiting"]),
                item["has_entered"],
            )
            for item in values["culprits"]
        )
        waits_for = {rank: tuple(item["waits_for"]) for rank, item in ranks.items()}
        told = {rank: item.get("waits_in", item["blocked"]) for rank, item in ranks.items()}
        waits_in = {rank: None if each is None else Communication(**each) for rank, each in told.items()}
        return HangReport(
            limit_s=float(values["limit_s"]),
            states={rank: RankState.from_dict(item) for rank, item in ranks.items()},
            idle_s={rank: float(item["idle_s"]) for rank, item in ranks.items()},
            processes={rank: item["process_state"] for rank, item in ranks.items()},
            answers={rank: item for rank, item in ranks.items() if "stacks" in item},
            diagnosis=Diagnosis(waits_in, waits_for, culprits, bool(values["is_circle"])),
            time=str(values["time"]),
        )
    except OSError as error:
        raise HangReportError(f"{path} cannot be read: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise HangReportError(
            f"{path} is not a hang report: {error!r}; pass a hang-*.json of a --save folder"
        ) from error
