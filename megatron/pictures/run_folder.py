"""What lies in the folder of a run beside its metrics: checkpoints, reports of hangs, recorded schedules."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from megatron.core.errors import DataError
from megatron.core.pipeline_parallel.simulator import ScheduleError
from megatron.core.pipeline_parallel.timeline import read_timeline
from megatron.pictures.checkpoint_health import HealthChecks
from megatron.pictures.files_read import FilesRead
from megatron.pictures.metrics_record import METRICS_FILE
from megatron.pictures.planned_schedule import planned_timeline
from megatron.planner.pipeline_chart import draw_svg
from megatron.training.fault_tolerance.hang_report import HangReportError, read_hang_report

_DEEPEST, _MOST_RUNS, _MOST_SHOWN = 4, 200, 8
_LARGEST_SCHEDULE = 1 << 22
_LARGEST_REPORT, _HANG_LINES = 1 << 25, 8
_CHART_WIDTH = 1080


def find_runs(folder: Path) -> dict[str, Path]:
    """Return the folders of runs at most four levels below a folder, or itself, by their place in it; newest first."""
    found: list[Path] = []
    level = [folder]
    for _ in range(_DEEPEST + 1):
        found += [each for each in level if (each / METRICS_FILE).is_file()]
        level = [below for each in level for below in _folders_in(each)]
    found.sort(key=lambda run: (run / METRICS_FILE).stat().st_mtime, reverse=True)
    return {str(run.relative_to(folder)): run for run in found[:_MOST_RUNS]}


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
    """Hold one run's folder, and show what is in it as parts of a page; ``hangs`` tells of reports."""

    name: str
    path: Path
    checks: HealthChecks
    hangs: FilesRead[str]

    def parts(self) -> Iterator[str]:
        """Yield the parts: checkpoints, hangs and recorded schedules; nothing for what there is none of."""
        rows = list(self._checkpoints())
        if rows:
            yield (
                f"<h2>Checkpoints of {escape(self.name)}</h2><table><tr><th>checkpoint</th><th>MiB</th>"
                f"<th class='text'>state</th><th class='text'>health</th></tr>{''.join(rows)}</table><p>Names and "
                "sizes of files are compared; <code>megatron inspect DIR --verify</code> reads every byte.</p>"
            )
        for number, path in enumerate(sorted(self.path.glob("hang-*.json"), reverse=True)[:_MOST_SHOWN]):
            yield (
                f'<p class="bad">A hang was reported: <code>{escape(str(path))}</code>; '
                f"<code>python tools/read_flight.py</code> explains it.</p>"
            )
            if number == 0:
                yield self._hang(path)
        for path in sorted(self.path.glob("*schedule*.json"))[:_MOST_SHOWN]:
            yield from self._schedule(path)

    def _checkpoints(self) -> Iterator[str]:
        newest = self._newest()
        for folder in sorted(self.path.glob("iter_*"), reverse=True)[:_MOST_SHOWN]:
            try:
                size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
                megabytes = f"{size / 2**20:.1f}"
            except OSError:
                if not folder.is_dir():
                    continue  # It has just been removed.
                megabytes = ""  # A file of a checkpoint that is being written went, or something cannot be read.
            notes = ["the one that is loaded"] if folder.name == newest else []
            notes += ["known to train"] if (folder / "known_to_train.json").is_file() else []
            health = self.checks.of(folder)
            cells = f'<td>{megabytes}</td><td class="text">{", ".join(notes)}</td>'
            cells += f'<td class="text{"" if health.is_whole else " bad"}">{escape(health.words)}</td>'
            yield f"<tr><td>{escape(folder.name)}</td>{cells}</tr>"

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
        with contextlib.suppress(ScheduleError):  # of a file that others wrote
            planned = planned_timeline(recorded)
            yield (
                f"<h2>Planned schedule of {escape(self.name)}, seconds</h2><p>The same passes with the usual time of "
                f"each, and none that waits for more than it needs: {planned.makespan:.4g} s in place of "
                f'{recorded.makespan:.4g} s.</p><div class="wide">{draw_svg(planned, _CHART_WIDTH)}</div>'
            )


def tell_hang(path: Path) -> str:
    """Return the first lines of a report of a hang, and who holds up whom, as a part of a page."""
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
