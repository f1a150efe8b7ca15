"""The files of a run's folder other than its metrics: checkpoints, hang reports and recorded schedules.

Files are cached and read again if they change. A checkpoint is checked by the names and sizes of its files, and no
shard is read.
"""

from __future__ import annotations

import contextlib
import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Generic, TypeVar

from megatron.checkpoint import FORMAT_NAMES, detect_format
from megatron.core.dist_checkpointing import INDEX_FILE, CheckpointIndex, read_index
from megatron.core.errors import CheckpointError, DataError
from megatron.core.pipeline_parallel import (
    Durations,
    Pass,
    RankTimeline,
    ScheduleError,
    Timeline,
    read_timeline,
    simulate,
)
from megatron.planner import draw_svg
from megatron.plotting.metrics_record import METRICS_FILE
from megatron.plotting.run_page import table
from megatron.training.fault_tolerance import HangReportError, read_hang_report
from megatron.training.loggers import CONFIG_FILE, RECORD_FOLDER

Content = TypeVar("Content")

_MOST_KEPT = 256


class FilesRead(Generic[Content]):
    """Cache of parsed files; a file is read again if its size, modification time or change time differs."""

    def __init__(self, read: Callable[[Path], Content]) -> None:
        self._read = read
        self._known: dict[Path, tuple[tuple[int, int, int], Content]] = {}

    def of(self, path: Path) -> Content:
        """Return the current parsed content of a file.

        Raises:
            OSError: the file's status cannot be read.
        """
        status = path.stat()
        # The ctime covers permission changes: a file that was unreadable may have become readable.
        mark = (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        known = self._known.get(path)
        if known is None or known[0] != mark:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            known = self._known[path] = (mark, self._read(path))
        return known[1]


_MOST_NAMED = 3


@dataclass(frozen=True)
class CheckpointHealth:
    """Health of a checkpoint in words, and whether it matches its index."""

    words: str
    is_whole: bool = True


class HealthChecks:
    """Checks of checkpoints against their indices, which are cached and read again if they change."""

    def __init__(self) -> None:
        self._sizes = FilesRead(lambda path: _sizes_of(path.parent))

    def of(self, folder: Path) -> CheckpointHealth:
        """Return the health of one iteration's folder.

        For the native format, the index must exist and match its own checksum, and each shard must have the size that
        the index records.
        """
        try:
            found = detect_format(folder)
            if found not in ("native", None):
                return CheckpointHealth(f"{FORMAT_NAMES[found]}, which has no checksums: not checked")
            return self._of_native(folder)
        except OSError as error:
            return CheckpointHealth(f"cannot be checked: {error.strerror or error}", is_whole=False)

    def _of_native(self, folder: Path) -> CheckpointHealth:
        try:
            sizes = self._sizes.of(folder / INDEX_FILE)
        except FileNotFoundError:
            return CheckpointHealth(f"no {INDEX_FILE}: incomplete or damaged", is_whole=False)
        if isinstance(sizes, str):
            return CheckpointHealth(sizes, is_whole=False)
        problems = [problem for name, size in sizes.items() if (problem := _problem(folder / name, size)) is not None]
        if problems:
            more = f" and {len(problems) - _MOST_NAMED} more" if len(problems) > _MOST_NAMED else ""
            return CheckpointHealth(f"{', '.join(problems[:_MOST_NAMED])}{more}", is_whole=False)
        shards = "1 shard has the recorded size" if len(sizes) == 1 else f"{len(sizes)} shards have the recorded sizes"
        return CheckpointHealth(f"complete: the index matches its checksum, {shards}")


def _sizes_of(folder: Path) -> Mapping[str, int] | str:
    """Return the size of each shard in an index, or a message about the invalid index."""
    try:
        index: CheckpointIndex = read_index(folder)
    except CheckpointError as error:
        return str(error)
    if not index.is_intact:
        return f"{INDEX_FILE} was changed after it was written"
    return {name: file.num_bytes for name, file in index.files.items()}


def _problem(path: Path, size: int) -> str | None:
    try:
        found = path.stat().st_size
    except FileNotFoundError:
        return f"{path.name} is missing"
    return None if found == size else f"{path.name} has {found} of {size} bytes"


def planned_timeline(recorded: Timeline) -> Timeline:
    """Simulate the recorded passes in the same order on each rank, each as early as it can run.

    Each pass takes the median time of its kind on its rank, and messages take no time.

    Raises:
        ScheduleError: the passes do not form a valid schedule.
    """
    return simulate(
        [rank.actions for rank in recorded.ranks], recorded.num_chunks, [_durations(rank) for rank in recorded.ranks]
    )


def _durations(rank: RankTimeline) -> Durations:
    seconds: dict[Pass, list[float]] = defaultdict(list)
    lengths = [(action, end - start) for action, start, end in zip(rank.actions, rank.starts, rank.ends, strict=True)]
    late = {
        (action.microbatch, action.chunk): length for action, length in lengths if action.kind is Pass.OUTPUT_WEIGHT
    }
    for action, length in lengths:
        # Count the deferred output weight gradient as part of its backward pass.
        left = late.get((action.microbatch, action.chunk), 0.0) if action.kind is Pass.BACKWARD else 0.0
        seconds[action.kind].append(length + left)
    usual = {kind: median(found) for kind, found in seconds.items()}
    return Durations(
        forward=usual.get(Pass.FORWARD, 0.0),
        backward=usual.get(Pass.BACKWARD, 0.0),
        backward_input=usual.get(Pass.BACKWARD_INPUT, 0.0),
        backward_weight=usual.get(Pass.BACKWARD_WEIGHT, 0.0),
        output_weight=usual.get(Pass.OUTPUT_WEIGHT, 0.0),
    )


_DEEPEST, _MOST_RUNS, _MOST_SHOWN = 4, 200, 8
_LARGEST_SCHEDULE = 1 << 22
_LARGEST_REPORT, _HANG_LINES = 1 << 25, 8
_CHART_WIDTH = 1080


def find_runs(folder: Path) -> dict[str, Path]:
    """Find run folders down to four levels below a folder, the last started first, and return them by relative path."""
    found: list[Path] = []
    level = [folder]
    for _ in range(_DEEPEST + 1):
        found += [each for each in level if (each / METRICS_FILE).is_file()]
        level = [below for each in level for below in _folders_in(each)]
    found.sort(key=_started, reverse=True)
    return {str(run.relative_to(folder)): run for run in found[:_MOST_RUNS]}


def _started(run: Path) -> float:
    """Return the time of the last start, which the run's record has, or else of the last line of the metrics."""
    try:
        return (run / RECORD_FOLDER / CONFIG_FILE).stat().st_mtime
    except OSError:
        return (run / METRICS_FILE).stat().st_mtime


def _folders_in(folder: Path) -> list[Path]:
    try:
        return [
            path
            for path in sorted(folder.iterdir())
            if path.is_dir() and not path.is_symlink() and not path.name.startswith((".", "iter_"))
        ]
    except OSError:
        return []


@dataclass(frozen=True)
class RunFolder:
    """One run's folder, rendered as parts of a page; ``hangs`` renders hang reports."""

    name: str
    path: Path
    checks: HealthChecks
    hangs: FilesRead[str]

    def parts(self) -> Iterator[str]:
        """Yield the parts that exist: checkpoints, hang reports and recorded schedules."""
        rows = list(self._checkpoints())
        if rows:
            heads = ("checkpoint", "MiB", "state", "health")
            yield (
                f"<h2>Checkpoints of {escape(self.name)}</h2>"
                f"{table(f'checkpoints:{escape(self.name)}', heads, rows, texts=('state', 'health'))}"
                '<p class="muted">Names and sizes of files are compared; <code>megatron inspect DIR --verify</code> '
                "reads every byte.</p>"
            )
        for number, path in enumerate(sorted(self.path.glob("hang-*.json"), reverse=True)[:_MOST_SHOWN]):
            yield (
                f'<p class="bad">A hang was reported: <code>{escape(str(path))}</code>; '
                f"<code>megatron hang-report</code> explains it.</p>"
            )
            if number == 0:
                yield self._hang(path)
        for path in sorted(self.path.glob("*schedule*.json"))[:_MOST_SHOWN]:
            yield from self._schedule(path)

    def _checkpoints(self) -> Iterator[tuple[str, ...]]:
        newest = self._newest()
        for folder in sorted(self.path.glob("iter_*"), reverse=True)[:_MOST_SHOWN]:
            try:
                size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                megabytes = f"{size / 2**20:.1f}"
            except OSError:
                if not folder.is_dir():
                    continue  # The folder was just removed.
                megabytes = ""  # A file of a checkpoint in progress was renamed, or a file cannot be read.
            notes = ["loaded by default"] if folder.name == newest else []
            notes += ["validated"] if (folder / "known_to_train.json").is_file() else []
            health = self.checks.of(folder)
            words = escape(health.words)
            shown = words if health.is_whole else f'<span class="bad">{words}</span>'
            yield escape(folder.name), megabytes, ", ".join(notes), shown

    def _newest(self) -> str:
        try:
            return f"iter_{int((self.path / 'latest_checkpointed_iteration.txt').read_text()[:32]):07d}"
        except (OSError, ValueError):
            return ""

    def _hang(self, path: Path) -> str:
        try:
            return self.hangs.of(path)
        except OSError as error:
            return f"<p>{escape(path.name)} cannot be read: {escape(str(error.strerror))}</p>"

    def _schedule(self, path: Path) -> Iterator[str]:
        try:
            if path.stat().st_size > _LARGEST_SCHEDULE:
                return
            recorded = read_timeline(path)
            drawing = draw_svg(recorded, _CHART_WIDTH)
        except (OSError, DataError, json.JSONDecodeError):
            return
        yield f'<h2>Recorded schedule of {escape(self.name)}, seconds</h2><div class="wide">{drawing}</div>'
        with contextlib.suppress(ScheduleError):  # a file that another program wrote
            planned = planned_timeline(recorded)
            yield (
                f"<h2>Planned schedule of {escape(self.name)}, seconds</h2><p>The same passes with the usual time of "
                f"each, and none that waits for more than it needs: {planned.makespan:.4g} s instead of "
                f'{recorded.makespan:.4g} s.</p><div class="wide">{draw_svg(planned, _CHART_WIDTH)}</div>'
            )


def tell_hang(path: Path) -> str:
    """Render the first lines of a hang report and its root-cause lines as a part of a page."""
    try:
        if path.stat().st_size > _LARGEST_REPORT:
            raise HangReportError(f"it is larger than {_LARGEST_REPORT} bytes")
        report = read_hang_report(path)
        first = "\n".join([report.time, report.headline(), *report.table()[:_HANG_LINES]])
        culprits = report.culprit_lines()[:_HANG_LINES]
    except (OSError, HangReportError) as error:
        return f"<p>{escape(str(error))}</p>"
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        return f"<p>{escape(path.name)} is damaged: {escape(repr(error))}</p>"
    named = (f'<p class="sample">{escape(line)}</p>' for line in culprits)
    return "\n".join([f'<pre class="wide">{escape(first)}</pre>', *named])
