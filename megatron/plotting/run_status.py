"""Status of a run, determined from the files in its folder.

A run in training holds the lock of its folder and appends a line to its metrics file in every iteration. When it ends,
it writes ``run_record/end.json`` and releases the lock. If the lock is left by a process that is gone, the run was
killed. The limit on the time without a line is that of the watchdog.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from megatron.core.safe_io import parse_json, read_plain_file
from megatron.plotting.metrics_record import METRICS_FILE
from megatron.training.fault_tolerance import FOLDER_RECORD, LockOwner, read_owner
from megatron.training.loggers import END_FILE, RECORD_FOLDER, STARTS_FILE

State = Literal["running", "finished", "stopped", "crashed", "hung", "ended"]

_TRAINING = "a training run"
_TAIL_BYTES = 1 << 16
_DEFAULT_TIMEOUT_S = 60.0
_STEPS = 5.0
_MOST_STEPS = 100
_WRITTEN = "written"


@dataclass(frozen=True)
class RunStatus:
    """State of a run, the reason in words, its progress, and the seconds since the last line of its metrics file.

    The state is ``stopped`` if the run ended on request before its last iteration, and ``ended`` if it left no record
    of how it ended. ``iteration`` is 0 before the first line. ``total`` is None if the run did not record its length.
    """

    state: State
    reason: str
    iteration: int
    total: int | None
    age_s: float

    def progress(self) -> str:
        """Describe the progress: ``iteration 20 of 100``."""
        return f"iteration {self.iteration:,}" + ("" if self.total is None else f" of {self.total:,}")


@dataclass(frozen=True)
class MetricsTail:
    """Last iteration in a metrics file, and the seconds of the iterations before it."""

    iteration: int = 0
    step_times: tuple[float, ...] = field(default=())


def read_tail(path: Path) -> MetricsTail:
    """Read the last lines of a metrics file; the last one may be incomplete.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _TAIL_BYTES, 0))
        lines = file.read().splitlines()
    iteration = 0
    step_times: list[float] = []
    for line in lines:
        values = _parsed(line)
        if type(values.get("iteration")) is not int:
            continue
        iteration = max(iteration, values["iteration"])
        seconds = values.get("step_time_s")
        if isinstance(seconds, (int, float)) and 0 < seconds < float("inf"):
            step_times.append(float(seconds))
    return MetricsTail(iteration, tuple(step_times[-_MOST_STEPS:]))


def read_status(
    folder: Path, now: float | None = None, tail_of: Callable[[Path], MetricsTail] = read_tail
) -> RunStatus:
    """Determine the status of the run that saves to a folder.

    ``now`` is the time in seconds since 1970. ``tail_of`` reads the end of the metrics file, perhaps from a cache.

    Raises:
        OSError: the metrics file cannot be read.
    """
    now = time.time() if now is None else now
    metrics = folder / METRICS_FILE
    tail, written = tail_of(metrics), metrics.stat().st_mtime
    start = _last_start(folder / RECORD_FOLDER / STARTS_FILE)
    end = _read_object(folder / RECORD_FOLDER / END_FILE)
    total = start.get("train_iters")
    total = total if isinstance(total, int) else None
    owner = _owner(folder)
    if owner is not None and owner.is_alive:
        state, reason = _of_live(folder, owner, tail, start, written, now)
    else:
        state, reason = _of_ended(folder, owner, tail, end, total, written)
    return RunStatus(state, reason, tail.iteration, total, max(now - written, 0.0))


def duration(seconds: float) -> str:
    """Format a duration with one unit: 8 s, 3 min, 5 h, 2 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def _owner(folder: Path) -> LockOwner | None:
    """Return the owner of the folder, or else of the metrics file, which may be outside of the --save folder."""
    for prefix in (FOLDER_RECORD, f".{METRICS_FILE}{FOLDER_RECORD}"):
        owner = read_owner(folder, prefix)
        if owner is not None and owner.record.purpose == _TRAINING:
            return owner
    return None


def _of_live(
    folder: Path, owner: LockOwner, tail: MetricsTail, start: Mapping[str, Any], written: float, now: float
) -> tuple[State, str]:
    process = owner.record.process
    if owner.is_suspended:
        return "hung", f"process {process.pid} on {process.host} is stopped by a signal"
    report = _newest_report(folder, written)
    if report is not None:
        return "hung", f"{report} reports a hang"
    silent_s = now - max(written, owner.record.since)
    if written < owner.record.since:
        return "running", f"setting up for {duration(silent_s)}"
    usual_s = _median(tail.step_times) if tail.step_times else 0.0
    if _evaluates_or_saves(tail.iteration, start):
        # These phases write no lines. If they hang, the watchdog of the run reports it.
        return "running", f"evaluating or saving for {duration(silent_s)}" if silent_s > 2 * usual_s + 1 else ""
    if silent_s > _limit_s(tail, start):
        usual = f"; an iteration usually takes {_seconds(usual_s)}" if usual_s else ""
        return "hung", f"no iteration for {duration(silent_s)}{usual}"
    return "running", ""


def _of_ended(
    folder: Path, owner: LockOwner | None, tail: MetricsTail, end: Mapping[str, Any], total: int | None, written: float
) -> tuple[State, str]:
    iteration, ended = end.get("iteration"), end.get(_WRITTEN, 0.0)
    # An owner that locked the folder later was killed before it could remove the earlier record.
    if isinstance(iteration, int) and (owner is None or ended >= owner.record.since):
        error = end.get("error")
        if isinstance(error, str):
            return "crashed", error
        if total is not None and iteration < total:
            return "stopped", "on request, before the last iteration"
        return "finished", ""
    if owner is not None:
        process = owner.record.process
        report = _newest_report(folder, written)
        how = "was killed, or its node failed" if report is None else f"ended after the hang in {report}"
        return "crashed", f"process {process.pid} on {process.host} {how}"
    if total is not None and tail.iteration >= total:
        return "finished", ""
    return "ended", "the run left no record of how it ended"


def _limit_s(tail: MetricsTail, start: Mapping[str, Any]) -> float:
    timeout_s = start.get("hang_timeout_seconds")
    timeout_s = timeout_s if isinstance(timeout_s, int) and timeout_s > 0 else _DEFAULT_TIMEOUT_S
    return max(timeout_s, _STEPS * max(tail.step_times, default=0.0))


def _evaluates_or_saves(iteration: int, start: Mapping[str, Any]) -> bool:
    """Return whether an evaluation or a checkpoint is due after an iteration."""
    intervals = (start.get("eval_interval"), start.get("save_interval"), start.get("train_iters"))
    return any(isinstance(each, int) and each > 0 and iteration % each == 0 for each in intervals)


def _newest_report(folder: Path, written: float) -> str | None:
    """Return the name of the newest hang report if no iteration was done after it."""
    names = [path.name for path in folder.glob("hang-*.json") if path.stat().st_mtime >= written]
    return max(names, default=None)


def _last_start(path: Path) -> Mapping[str, Any]:
    """Return the last line of ``starts.jsonl``."""
    try:
        lines = read_plain_file(path).splitlines()
    except OSError:
        return {}
    return _parsed(lines[-1]) if lines else {}


def _read_object(path: Path) -> Mapping[str, Any]:
    """Read a JSON object, and add the time at which it was written; return an empty one if there is none."""
    try:
        return {**_parsed(read_plain_file(path)), _WRITTEN: path.stat().st_mtime}
    except OSError:
        return {}


def _parsed(text: bytes) -> Mapping[str, Any]:
    """Return the values of a JSON object, or none if the text is not one, such as an incomplete line."""
    try:
        values = parse_json(text)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}


def _median(values: tuple[float, ...]) -> float:
    return sorted(values)[len(values) // 2]


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{value * 1000:.0f} ms"
