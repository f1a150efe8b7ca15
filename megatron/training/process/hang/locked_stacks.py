"""The stacks of a process whose interpreter is locked: it writes them itself, in a signal handler, when it is asked."""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from megatron.training.process.hang.processes import ProcessName, state_of
from megatron.training.process.hang.short_path import short_path

# No library that a training uses takes it; 0 where the system has no such signals.
_NUMBER = signal.SIGRTMIN + 6 if hasattr(signal, "SIGRTMIN") else 0
_WAIT_S = 2.0
_SETTLED_S = 0.2
_FRAME = re.compile(r'  File "(.*)", line (\d+) in (.*)')


class StackFile:
    """Let this process write its stacks into a file of its own on a signal, while this is open."""

    def __init__(self) -> None:
        self._file = tempfile.NamedTemporaryFile("w", prefix="megatron-stacks-", suffix=".txt")  # noqa: SIM115
        if _NUMBER:
            # What `unregister` goes back to: a signal that comes late must not end the process.
            signal.signal(_NUMBER, signal.SIG_IGN)
            faulthandler.register(_NUMBER, self._file, all_threads=True)

    @property
    def path(self) -> str:
        """Return the file; empty where there are no such signals."""
        return self._file.name if _NUMBER else ""

    def close(self) -> None:
        """Listen no more, and remove the file."""
        if _NUMBER:
            faulthandler.unregister(_NUMBER)
        self._file.close()


def ask_for_stacks(process: ProcessName, path: str) -> list[dict[str, Any]]:
    """Return the stacks of a process of this machine that runs but does not answer; none where it does not write."""
    file = Path(path)
    if not path or state_of(process) != "alive" or not file.is_file():
        return []
    deadline = time.monotonic() + _WAIT_S
    text = ""
    try:
        os.kill(process.pid, _NUMBER)
        while time.monotonic() < deadline:
            time.sleep(_SETTLED_S)
            before, text = text, file.read_text(errors="replace")
            if text and text == before:
                break
    except OSError:
        return []
    return parse_stacks(text)


def parse_stacks(text: str) -> list[dict[str, Any]]:
    """Return what `faulthandler` has written as `rank_state.stacks` would say it: the innermost frames last."""
    stacks = []
    for block in re.split(r"\n(?=(?:Current thread|Thread) )", text):
        head, *lines = block.splitlines() or [""]
        frames = [match for match in map(_FRAME.match, lines) if match is not None]
        named = [f"{short_path(match[1])}:{match[2]} in {match[3]}" for match in reversed(frames)]
        if named:
            stacks.append({"thread": head.partition(" (most recent")[0], "frames": named})
    # The main thread is the last that faulthandler writes.
    return [{**stacks[-1], "thread": "MainThread"}, *stacks[:-1]] if stacks else []
