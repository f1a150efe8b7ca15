"""Live dashboard: serve the runs of a folder over HTTP, protected by a token."""

from __future__ import annotations

import http.server
import secrets
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from pathlib import Path
from urllib.parse import parse_qs, urlencode, urlsplit

from megatron.core.errors import DataError
from megatron.plotting.metrics_record import METRICS_FILE, MetricsRecord, read_metrics
from megatron.plotting.run_folder import FilesRead, HealthChecks, RunFolder, find_runs, tell_hang
from megatron.plotting.run_page import page, to_body

_COMPARED = 6
_REFRESH_MS = 5000
_STEP_TIMEOUT_S = 120
_SCRIPT = """
const shown = document.getElementById('shown'), state = document.getElementById('state');
async function refresh() {
  try {
    const answer = await fetch('body' + location.search);
    if (!answer.ok) throw new Error(answer.status);
    const top = window.scrollY;
    shown.innerHTML = await answer.text();
    window.scrollTo(0, top);
    state.textContent = 'live, ' + new Date().toLocaleTimeString();
  } catch (error) { state.textContent = 'no answer from the server; this page is out of date'; }
  setTimeout(refresh, %d);
}
setTimeout(refresh, %d);
"""


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
        self._records = FilesRead(lambda path: read_metrics(path.parent, str(path.parent.relative_to(folder))))

    def record(self, run: Path) -> MetricsRecord:
        """Return a run's current metrics; its file is read again if it has changed.

        Raises:
            DataError: the file cannot be read, or has no iteration yet.
        """
        try:
            return self._records.of(run / METRICS_FILE)
        except OSError as error:
            raise DataError(f"{run} cannot be read: {error.strerror}") from error


class _Handler(http.server.BaseHTTPRequestHandler):
    server: DashboardServer
    server_version, sys_version = "dashboard", ""
    timeout = 30

    def do_GET(self) -> None:
        """Serve the page, its refreshed body, or the text of a step."""
        place = urlsplit(self.path)
        query = parse_qs(place.query)
        given = query.get("token", [""])[0]
        if not secrets.compare_digest(given.encode(), self.server.token.encode()):
            self._answer(403, page("No access", "<p>Open the URL that the command printed: it contains the token.</p>"))
            return
        runs = find_runs(self.server.folder)
        chosen = [name for name in query.get("run", []) if name in runs] or list(runs)[:_COMPARED]
        if place.path == "/":
            self._answer(200, self._page(list(runs), chosen))
        elif place.path == "/body":
            self._answer(200, self._body(runs, chosen))
        elif place.path == "/step":
            self._answer(200, _step(runs, query))
        else:
            self._answer(404, page("Not found", "<p>There is no such page.</p>"))

    def _page(self, runs: Sequence[str], chosen: Sequence[str]) -> str:
        boxes = "".join(
            f'<label><input type="checkbox" name="run" value="{escape(name)}"{" checked" if name in chosen else ""}> '
            f"{escape(name)}</label> "
            for name in runs
        )
        token = f'<input type="hidden" name="token" value="{escape(self.server.token)}">'
        options = "".join(f"<option>{escape(name)}</option>" for name in runs)
        body = (
            f'<p id="state">live</p><form action="/">{token}{boxes}<button>compare</button></form>'
            f'<form action="step">{token}Text of step <input name="step" type="number" min="1" value="1"> of '
            f'<select name="run">{options}</select> <button>show</button></form>'
            f'<div id="shown">{self._body(find_runs(self.server.folder), chosen)}</div>'
            f'<script nonce="{self.server.token}">{_SCRIPT % (_REFRESH_MS, _REFRESH_MS)}</script>'
        )
        return page(f"Runs in {self.server.folder.resolve().name}", body)

    def _body(self, runs: dict[str, Path], chosen: Sequence[str]) -> str:
        records, problems = [], []
        for name in chosen:
            try:
                records.append(self.server.record(runs[name]))
            except DataError as error:
                problems.append(f'<p class="bad">{escape(str(error))}</p>')
        if not records and not problems:
            return f"<p>No run in {escape(str(self.server.folder))} has written a metrics.jsonl yet.</p>"
        drawn = [to_body(records)] if records else []
        folders = (RunFolder(name, runs[name], self.server.checks, self.server.hangs) for name in chosen)
        return "\n".join([*problems, *drawn, *(part for folder in folders for part in folder.parts())])

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


def _step(runs: dict[str, Path], query: dict[str, list[str]]) -> str:
    """Return the samples of one step, as ``megatron inspect_batch`` prints them."""
    name, step = query.get("run", [""])[0], query.get("step", [""])[0]
    if name not in runs or not step.isdecimal():
        return page("Not found", "<p>There is no such run or step.</p>")
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
    return page(f"Step {step} of {name}", f'<pre class="sample">{escape(shown)}</pre>')


def address(server: DashboardServer) -> str:
    """Return the address to open in a browser."""
    host, port = server.server_address[:2]
    return f"http://{host!s}:{port}/?{urlencode({'token': server.token})}"
