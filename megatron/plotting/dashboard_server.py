"""Live dashboard: serve the runs of a folder over HTTP, protected by a token."""

from __future__ import annotations

import http.server
import math
import secrets
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from megatron.core.errors import DataError
from megatron.plotting.chart import COLORS, ChartView
from megatron.plotting.metrics_record import METRICS_FILE, MetricsRecord, read_metrics
from megatron.plotting.run_folder import FilesRead, HealthChecks, RunFolder, find_runs, tell_hang
from megatron.plotting.run_page import further_parts, page, read_resource, to_charts, to_table
from megatron.plotting.run_status import MetricsTail, duration, read_status, read_tail

_COMPARED = 6
_SMOOTHING, _MOST_SMOOTHING = 0.6, 0.99
_STEP_TIMEOUT_S = 120
_DENIED = "<h1>No access</h1><p>Open the URL that the command printed: it contains the token.</p>"


class BadQuery(Exception):
    """Invalid value in the address; the message is for the user."""


@dataclass(frozen=True)
class View:
    """Query of an address: the compared runs, the weight of the smoothing, and the charts with a logarithmic scale."""

    chosen: Sequence[str]
    smoothing: float
    log_scale: frozenset[str]

    @classmethod
    def read(cls, query: Mapping[str, Sequence[str]], runs: Sequence[str]) -> View:
        """Read a query; without ``run``, the runs that were started last are compared.

        Raises:
            BadQuery: the smoothing is not a number in its range.
        """
        chosen = runs[:_COMPARED] if "run" not in query else [name for name in runs if name in query["run"]]
        text = query.get("smoothing", [str(_SMOOTHING)])[0]
        try:
            smoothing = float(text)
        except ValueError:
            smoothing = math.nan
        if not 0.0 <= smoothing <= _MOST_SMOOTHING:
            raise BadQuery(f"smoothing is {text[:40]!r}; use a number from 0 to {_MOST_SMOOTHING}")
        return cls(chosen, smoothing, frozenset(query.get("log", ())))


class DashboardServer(http.server.ThreadingHTTPServer):
    """HTTP server for the runs of a folder; every request must have the token.

    The server only reads files and never writes.
    """

    daemon_threads = True

    def __init__(self, folder: Path, host: str, port: int, token: str) -> None:
        super().__init__((host, port), _Handler)
        self.folder = folder
        self.token = token
        self.checks = HealthChecks()
        self.hangs = FilesRead(tell_hang)
        self.tails = FilesRead(read_tail)
        self._records = FilesRead(read_metrics)
        self._drawn: tuple[Sequence[MetricsRecord], View, str] | None = None

    def record(self, run: Path) -> MetricsRecord:
        """Return a run's current metrics; its file is read again if it has changed.

        Raises:
            DataError: the file cannot be read, or has no iteration yet.
        """
        try:
            return self._records.of(run / METRICS_FILE)
        except OSError as error:
            raise DataError(f"{run} cannot be read: {error.strerror}") from error

    def charts(self, records: Sequence[MetricsRecord], view: View) -> str:
        """Draw the charts of runs, unless the last ones were the same."""
        drawn = self._drawn
        if drawn is not None and drawn[:2] == (records, view):
            return drawn[2]
        charts = to_charts(records, view.smoothing, ChartView(view.log_scale, has_buttons=True))
        self._drawn = (records, view, charts)
        return charts


class _Handler(http.server.BaseHTTPRequestHandler):
    server: DashboardServer
    server_version, sys_version = "dashboard", ""
    timeout = 30

    def do_GET(self) -> None:
        """Serve the page, its refreshed parts, or the text of a step."""
        place = urlsplit(self.path)
        query = parse_qs(place.query, keep_blank_values=True)
        given = query.get("token", [""])[0]
        if not secrets.compare_digest(given.encode(), self.server.token.encode()):
            self._answer(403, page("No access", _DENIED))
            return
        runs = find_runs(self.server.folder)
        try:
            view = View.read(query, list(runs))
        except BadQuery as error:
            self._answer(400, page("Wrong address", f"<h1>Wrong address</h1><p>{escape(str(error))}</p>"))
            return
        if place.path == "/":
            self._answer(200, self._page(runs, view))
        elif place.path == "/body":
            self._answer(200, "\n".join(self._parts(runs, view).values()))
        elif place.path == "/step":
            self._answer(200, self._step(runs, query))
        else:
            self._answer(404, page("Not found", "<h1>Not found</h1><p>There is no such page.</p>"))

    def _page(self, runs: Mapping[str, Path], view: View) -> str:
        parts = self._parts(runs, view)
        title = f"Runs in {self.server.folder.resolve().name}"
        slider = (
            f'<label>Smoothing <input type="range" id="smoothing" min="0" max="{_MOST_SMOOTHING}" step="0.01" '
            f'value="{view.smoothing:g}"><output id="weight" for="smoothing">{view.smoothing:.2f}</output></label>'
        )
        scripts = "\n".join(read_resource(name) for name in ("charts.js", "dashboard.js"))
        body = (
            f'<header class="top"><h1>{escape(title)}</h1><p id="state" role="status">live</p></header>'
            f'<div class="dashboard"><nav class="panel" aria-label="runs">{parts["list"]}</nav><main>'
            f'<div class="panel tools">{slider}<span class="muted">The faint lines are the values without smoothing.'
            f"</span></div>{parts['problems']}{parts['summary']}{parts['charts']}{parts['more']}{self._step_form(runs)}</main></div>"
            f'<script nonce="{self.server.token}">\n{scripts}</script>'
        )
        return page(title, body)

    def _step_form(self, runs: Mapping[str, Path]) -> str:
        options = "".join(f"<option>{escape(name)}</option>" for name in runs)
        return (
            f'<form action="step" class="panel tools"><input type="hidden" name="token" '
            f'value="{escape(self.server.token)}"><label>Training text of step '
            f'<input name="step" type="number" min="1" value="1" required></label>'
            f'<label>of <select name="run">{options}</select></label><button>Show</button></form>'
        )

    def _parts(self, runs: Mapping[str, Path], view: View) -> dict[str, str]:
        """Return the parts of the page that change, each an element with its id."""
        records, problems = [], []
        colors = colors_of(list(runs), view.chosen)
        for name, color in colors.items():
            try:
                records.append(replace(self.server.record(runs[name]), name=name, color=color))
            except DataError as error:
                problems.append(f'<p class="bad">{escape(str(error))}</p>')
        if not runs:
            problems.append(f"<p>No run in {escape(str(self.server.folder))} has written a metrics.jsonl yet.</p>")
        elif not view.chosen:
            problems.append("<p>No run is selected.</p>")
        folders = (RunFolder(name, runs[name], self.server.checks, self.server.hangs) for name in view.chosen)
        more = [*further_parts(records), *(part for folder in folders for part in folder.parts())]
        contents = {
            "list": _run_list(runs, colors, self.server.tails),
            "problems": "".join(problems),
            "summary": to_table(records) if records else "",
            "charts": self.server.charts(records, view) if records else "",
            "more": "\n".join(more),
        }
        return {name: f'<div id="{name}">{content}</div>' for name, content in contents.items()}

    def _step(self, runs: Mapping[str, Path], query: Mapping[str, Sequence[str]]) -> str:
        """Return the samples of one step, as ``megatron inspect_batch`` prints them."""
        name, step = query.get("run", [""])[0], query.get("step", [""])[0]
        if name not in runs or not step.isdecimal():
            return page("Not found", "<h1>Not found</h1><p>There is no such run or step.</p>")
        words = ["inspect_batch", "--load", str(runs[name]), "--step", step, "--max-samples", "16"]
        try:
            result = subprocess.run(
                [sys.executable, "-m", "megatron", *words],
                capture_output=True,
                text=True,
                timeout=_STEP_TIMEOUT_S,
                check=False,
            )
            shown = result.stdout + result.stderr
        except subprocess.TimeoutExpired:
            shown = f"reading the step took longer than {_STEP_TIMEOUT_S} seconds"
        title = f"Step {step} of {name}"
        back = f'<p><a href="/?{escape(urlencode({"token": self.server.token}))}">All runs</a></p>'
        return page(title, f'<h1>{escape(title)}</h1>{back}<pre class="sample">{escape(shown)}</pre>')

    def _answer(self, status: int, text: str) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        policy = (
            f"default-src 'none'; style-src 'unsafe-inline'; connect-src 'self'; script-src 'nonce-{self.server.token}'"
        )
        self.send_header("Content-Security-Policy", policy)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Disable the log line per request."""


def colors_of(runs: Sequence[str], chosen: Sequence[str]) -> dict[str, int]:
    """Return the index of a color for each chosen run.

    A run keeps its color when others are selected or started, unless another chosen run has the same one and was
    started earlier.
    """
    colors: dict[str, int] = {}
    for number, name in enumerate(reversed(runs)):
        if name in chosen:
            free = [color for color in range(len(COLORS)) if color not in colors.values()]
            wanted = number % len(COLORS)
            colors[name] = wanted if wanted in free or not free else free[0]
    return {name: colors[name] for name in chosen}


def _run_list(runs: Mapping[str, Path], colors: Mapping[str, int], tails: FilesRead[MetricsTail]) -> str:
    """Return the list of all runs with their status; those with a color are selected."""
    items = []
    for name, folder in runs.items():
        try:
            status = read_status(folder, tail_of=tails.of)
        except OSError as error:
            badge, details = "", f"cannot be read: {error.strerror}"
        else:
            badge = f'<span class="status {status.state}">{status.state}</span>'
            age = f"last line {duration(status.age_s)} ago" if status.state in ("running", "hung") else ""
            age = age or f"{duration(status.age_s)} ago"
            details = " · ".join(each for each in (status.progress(), age, status.reason) if each)
        color, checked = (f" c{colors[name]}", " checked") if name in colors else ("", "")
        box = f'<input type="checkbox" id="run:{escape(name)}" value="{escape(name)}"{checked}>'
        items.append(
            f'<li><label class="run{color}">{box}<span class="name">{escape(name)}</span>'
            f'<span class="details">{badge}{escape(details)}</span></label></li>'
        )
    return f'<ul class="runs">{"".join(items)}</ul>'


def address(server: DashboardServer) -> str:
    """Return the address to open in a browser."""
    host, port = server.server_address[:2]
    return f"http://{host!s}:{port}/?{urlencode({'token': server.token})}"
