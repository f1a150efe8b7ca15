"""Watch how much memory each process of a command takes at most, by what Linux says under /proc."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

_INTERVAL_S = 0.1


@dataclass(frozen=True)
class WatchedCommand:
    """Hold how a command went: its output, its time, and the most memory that each process held, by name.

    The processes of torchrun are named by their ranks, a command of one process is ``rank 0``.
    """

    output: str
    wall_s: float
    peak_mib: Mapping[str, float]


def run_watched(command: Sequence[str], environment: Mapping[str, str], cwd: Path) -> WatchedCommand:
    """Run a command to its end.

    Raises:
        SystemExit: it failed; its output is in the message.
    """
    start = time.monotonic()
    process = subprocess.Popen(
        command,
        env=dict(environment),
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    peaks: dict[str, float] = {}
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(process.pid, peaks, ended))
    watcher.start()
    output, _ = process.communicate()
    wall_s = time.monotonic() - start
    ended.set()
    watcher.join()
    if process.returncode != 0:
        raise SystemExit(f"status {process.returncode} from: {' '.join(command)}\n{output}")
    return WatchedCommand(output, wall_s, dict(sorted(peaks.items())))


def _watch(root: int, peaks: dict[str, float], ended: threading.Event) -> None:
    """Note the high-water mark of a process and all below it until the end; a mark never falls."""
    while not ended.wait(_INTERVAL_S):
        for process in _descendants(root):
            try:
                name = _name_of(process)
                mark = _high_water_mib(process)
            except (OSError, ValueError):
                continue  # It has ended meanwhile.
            if name is not None:
                peaks[name] = max(mark, peaks.get(name, 0.0))


def _descendants(root: int) -> list[Path]:
    """Return a process and all that it has started, torchrun's workers in sessions of their own included."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                # Behind the name in parentheses, which may hold anything: state, parent.
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry.name))
    found = [root]
    for process in found:
        found.extend(children.get(process, ()))
    return [Path("/proc") / str(process) for process in found]


def _name_of(process: Path) -> str | None:
    """Return a process's rank, or None where it is no Python process, or torchrun itself."""
    words = (process / "cmdline").read_bytes().split(b"\0")
    if b"torch.distributed.run" in words or not any(word.endswith(b".py") for word in words):
        return None
    for entry in (process / "environ").read_bytes().split(b"\0"):
        if entry.startswith(b"RANK="):
            return f"rank {int(entry.removeprefix(b'RANK='))}"
    return "rank 0"


def _high_water_mib(process: Path) -> float:
    for line in (process / "status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0
