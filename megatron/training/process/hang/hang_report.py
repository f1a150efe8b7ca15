"""The report of a hang: who holds up whom and at what, as text for a terminal and as JSON for a file."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import InputError
from megatron.core.flight_recorder import Communication, format_ranks
from megatron.training.process.hang.diagnosis import Culprit, Diagnosis
from megatron.training.process.hang.rank_state import RankState, at_work, is_waiting
from megatron.training.process.hang.short_path import short_path

FORMAT = "megatron hang report 1"
_MOST_RANKS = 64
_MOST_STACKS = 8
_MOST_FRAMES = 16


class HangReportError(InputError):
    """Report a file that is no report of a hang."""


@dataclasses.dataclass(frozen=True)
class HangReport:
    """Hold what is known of a hang.

    ``idle_s`` is for how long each rank got nothing done, ``processes`` what the system said of each, ``answers`` what
    those said who could.
    """

    limit_s: float
    states: Mapping[int, RankState]
    idle_s: Mapping[int, float]
    processes: Mapping[int, str]
    answers: Mapping[int, Mapping[str, Any]]
    diagnosis: Diagnosis
    time: str = dataclasses.field(default_factory=lambda: time.strftime("%Y-%m-%d %H:%M:%S"))

    def culprit_lines(self) -> list[str]:
        """Return one line on each culprit: rank, group, operation and line."""
        return [self._name(culprit) for culprit in self.diagnosis.culprits[:_MOST_RANKS]]

    def headline(self) -> str:
        """Return for how long nothing got done, and after how many iterations."""
        longest = max(self.idle_s.values(), default=0.0)
        iteration = max((state.iteration for state in self.states.values()), default=0)
        return f"HANG: nothing has got done for {longest:.1f} s; {iteration} iterations are done"

    def to_text(self, path: str = "") -> str:
        """Return the report for a terminal, the culprits last; ``path`` is where it is kept."""
        lines = [self.headline(), *self.table()]
        for rank in self._ranks_with_stacks():
            for stack in self.answers[rank].get("stacks", ()):
                if stack["thread"] == "MainThread" or not is_waiting(stack):
                    lines.append(f"rank {rank}, thread {stack['thread']}:")
                    lines += [f"    {frame}" for frame in stack["frames"][-_MOST_FRAMES:]]
            if self.answers[rank].get("reading"):
                lines.append(f"rank {rank} reads samples {self.answers[rank]['reading']}")
        if path:
            lines.append(f"report: {path}; tools/read_flight.py draws it")
        return "\n".join([*lines, *(f"HANG: {line}" for line in self.culprit_lines())])

    def table(self) -> list[str]:
        """Return one line on each rank: its process, where it stands, what it waits in and for whom."""
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
        """Return everything as JSON-ready values."""
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
        """Write the JSON into a folder and return the file; None where it cannot be written."""
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
            return f"{who} waits in {describe_communication(waits_in)} for rank {awaited}, which waits in another"
        if culprit.waits_in is None:
            return f"{who} {doing}"
        has = "is inside" if culprit.has_entered else "has not entered"
        waiting = f", where rank {format_ranks(culprit.waiting)} waits" if culprit.waiting else ""
        return f"{who} {doing} and {has} {describe_communication(culprit.waits_in)}{waiting}"


def _device_words(state: RankState, waits_in: Communication | None) -> str:
    """Return what a device does that waits in no communication; "" for others."""
    if state.on_device is None or waits_in is not None:
        return ""
    if state.on_device.ahead is None:
        return ", with a device that has finished what it was given to communicate,"
    return f", with a device that is at work before {describe_communication(state.on_device.ahead)},"


def describe_communication(communication: Communication) -> str:
    """Return a communication in one phrase: operation, number, group, bytes and line."""
    size = f", {communication.num_bytes} bytes" if communication.num_bytes else ""
    file, _, line = communication.place.rpartition(":")
    return (
        f"{communication.operation} #{communication.sequence} of {communication.channel}{size} "
        f"({short_path(file)}:{line})"
    )


def read_hang_report(path: Path) -> HangReport:
    """Read back a file that `HangReport.write` has written.

    Raises:
        HangReportError: it cannot be read, or is something else.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(values, dict) or values.get("format") != FORMAT:
            raise HangReportError(f"{path} is no hang report; name a hang-*.json of a run's --save folder")
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
        raise HangReportError(f"{path} is no hang report: {error!r}; name a hang-*.json of a --save folder") from error
