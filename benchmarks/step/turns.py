"""Let contestants take turns of some seconds on the whole machine, while the processes of all others are stopped.

On a shared machine the speed changes by half within minutes, so that runs one after the other are not comparable.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Sequence
from typing import Any


def start_stopped(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start a process that only runs during its turns; its children are stopped with it."""
    process = subprocess.Popen(command, start_new_session=True, **options)
    os.killpg(process.pid, signal.SIGSTOP)
    return process


def take_turns(contestants: Sequence[Sequence[subprocess.Popen[bytes]]], seconds: float) -> None:
    """Let the processes of each contestant run in turns until all have ended.

    Raises:
        CalledProcessError: a process failed; all others are killed.
    """
    try:
        while any(map(_running, contestants)):
            for processes in contestants:
                _run_for(_running(processes), seconds)
    finally:
        for process in [each for processes in contestants for each in _running(processes)]:
            os.killpg(process.pid, signal.SIGKILL)


def _running(processes: Sequence[subprocess.Popen[bytes]]) -> list[subprocess.Popen[bytes]]:
    return [process for process in processes if process.returncode is None]


def _run_for(processes: Sequence[subprocess.Popen[bytes]], seconds: float) -> None:
    for process in processes:
        os.killpg(process.pid, signal.SIGCONT)
    end = time.monotonic() + seconds
    for process in processes:
        try:
            if process.wait(max(0.0, end - time.monotonic())):
                raise subprocess.CalledProcessError(process.returncode, process.args)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGSTOP)
