"""Run the parts of a GPU window one after the other, each in a process with a time limit. Imports no torch."""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.emulated_cuda.environment import emulated_environment
from tests.gpu.window import findings
from tests.gpu.window.findings import append_line
from tests.gpu.window.plan import Part, part_time, planned_seconds
from tests.harness.training_run import LAUNCHER_VARIABLES

REPOSITORY = Path(__file__).resolve().parents[3]
FINDINGS, REPORT, LOG = "findings.jsonl", "report.md", "failed_parts.log"
UNAVAILABLE_STATUS = 69
"""Exit status of a part that found no GPU (EX_UNAVAILABLE of sysexits.h)."""
_EMULATOR_REPORTED = 86
_LOG_BYTES = 64 * 1024
_REASON_CHARACTERS = 400


@dataclass(frozen=True)
class Settings:
    """Say how a window runs: where its files go, for how long, and on which emulated GPU type, if any.

    ``small`` takes sizes that a CPU computes in seconds. ``crash`` is the number of a part that is to kill itself.
    """

    folder: Path
    seconds: float
    emulated: str | None = None
    small: bool = False
    crash: int | None = None


@dataclass(frozen=True)
class Ended:
    """Describe how a part's process ended."""

    status: str
    reason: str
    seconds: float


Command = Callable[[Part, float], Sequence[str]]
"""Return the command of a part, which should be done after so many seconds."""


def run_window(
    parts: Sequence[Part],
    settings: Settings,
    after_part: Callable[[], None] = lambda: None,
    command: Command | None = None,
    say: Callable[[str], None] = print,
) -> list[Ended]:
    """Run the parts, append what they find and how they ended to the findings, and return how they ended.

    ``after_part`` is called after each. A part that fails, crashes or hangs costs no other part its time.
    """
    settings.folder.mkdir(parents=True, exist_ok=True)
    path = settings.folder / FINDINGS
    for name in (FINDINGS, REPORT, LOG):
        (settings.folder / name).unlink(missing_ok=True)
    with _ending_on_sigterm():
        return _run_parts(parts, settings, path, after_part, command or _part_command(settings), say)


@contextlib.contextmanager
def _ending_on_sigterm() -> Iterator[None]:
    """Let SIGTERM raise, so that the running part is killed too: it has a session of its own."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_parts(
    parts: Sequence[Part],
    settings: Settings,
    path: Path,
    after_part: Callable[[], None],
    command: Command,
    say: Callable[[str], None],
) -> list[Ended]:
    planned = planned_seconds(parts, settings.seconds)
    begun = time.monotonic()
    append_line(path, _first_line(parts, settings))
    ended = []
    for index, part in enumerate(parts):
        left = settings.seconds - (time.monotonic() - begun)
        allowed = part_time(part, parts[index + 1 :], planned, left)
        limit = allowed.limit
        if limit <= 0.0:
            outcome = Ended(findings.NOT_RUN, "the time of the window was up", 0.0)
        else:
            say(f"part {part.number}, {part.title}: up to {limit:.0f} s")
            words = command(part, allowed.planned)
            outcome = _run(part, words, limit, settings)
        ended.append(outcome)
        append_line(
            path,
            {
                "kind": "part",
                "part": part.number,
                "status": outcome.status,
                "reason": outcome.reason,
                "seconds": round(outcome.seconds, 1),
                "limit_s": round(limit, 1),
                "planned_s": round(allowed.planned, 1),
            },
        )
        because = f": {outcome.reason}" if outcome.reason else ""
        say(f"part {part.number} {outcome.status} after {outcome.seconds:.0f} s{because}")
        after_part()
    return ended


def _first_line(parts: Sequence[Part], settings: Settings) -> findings.Line:
    commit = "unknown"
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=10
        )
        commit = done.stdout.strip()
    return {
        "kind": "window",
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "commit": commit,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()}, {os.cpu_count()} CPU cores",
        "seconds": settings.seconds,
        "emulated": settings.emulated,
        "small": settings.small,
        "parts": [part.number for part in parts],
    }


def _part_command(settings: Settings) -> Command:
    def command(part: Part, seconds: float) -> list[str]:
        words = [sys.executable, "-m", "tests.gpu.window.run_part", str(part.number)]
        words += ["--findings", str(settings.folder / FINDINGS), "--seconds", f"{seconds:.1f}"]
        words += ["--small"] if settings.small else []
        return words + (["--crash"] if settings.crash == part.number else [])

    return command


def part_environment(part: Part, settings: Settings) -> Mapping[str, str]:
    """Return the environment of a part's process."""
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join([str(REPOSITORY), *filter(None, [environment.get("PYTHONPATH")])])
    environment["PYTHONUNBUFFERED"] = "1"
    # It would keep the part on the CPU.
    environment.pop("MEGATRON_DEVICE", None)
    if settings.emulated is None:
        # As runs of this project do: freed blocks of unequal sizes leave no holes.
        environment.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
        return environment
    environment["OMP_NUM_THREADS"] = "1"
    return emulated_environment(1, settings.emulated, triton=part.interprets, base=environment)


def _run(part: Part, command: Sequence[str], limit: float, settings: Settings) -> Ended:
    """Run a part's process; what it started is killed with it when its time is up or when it has ended."""
    begun = time.monotonic()
    with tempfile.TemporaryFile() as output:
        try:
            process = subprocess.Popen(
                command,
                cwd=REPOSITORY,
                env=part_environment(part, settings),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            return Ended(findings.CRASHED, f"its process cannot be started: {error}", 0.0)
        status, reason = findings.COMPLETED, ""
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            status, reason = findings.TIMED_OUT, f"stopped after {limit:.0f} s; what it found before counts"
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        log = output.read()
    if code == UNAVAILABLE_STATUS:
        status, reason = findings.UNAVAILABLE, _last_line(log)
    elif code == _EMULATOR_REPORTED and settings.emulated is not None:
        status, reason = findings.CRASHED, f"the emulator reported a fault: {_last_line(log)}"
    elif code is not None and code < 0:
        status, reason = findings.CRASHED, f"ended by signal {signal.Signals(-code).name}; {LOG} has its output"
    elif code:
        status, reason = findings.CRASHED, f"exit status {code}: {_last_line(log)}"
    if status in (findings.TIMED_OUT, findings.CRASHED):
        with open(settings.folder / LOG, "ab") as logs:
            logs.write(f"===== part {part.number}, {part.title}: {status} =====\n".encode())
            logs.write(log[-_LOG_BYTES:] + b"\n")
    return Ended(status, reason, time.monotonic() - begun)


def _last_line(log: bytes) -> str:
    lines = [line.strip() for line in log.decode(errors="replace").splitlines() if line.strip()]
    return lines[-1][:_REASON_CHARACTERS] if lines else "it printed nothing"
