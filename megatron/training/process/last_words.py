"""The reason why a process ends, where it is seen: in the launcher's error file, and as the last line of a run."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.training.process.initialize import elastic_run_id, launcher_error_file
from megatron.training.process.launcher import find_launcher
from megatron.training.process.process_identity import parent_of

OWN_RUN_ID = "megatron-"
"""How the number of a run begins whose ranks ``megatron train`` has started: it says last what went wrong."""

# torchrun prints its report of a failed process at its very end. What it was is printed when torchrun has given up its
# memory: that is after its last word, and before anybody who waits for its end goes on.
_SPEAKER = """
import sys, time
words, deadline = sys.stdin.read(), time.monotonic() + float(sys.argv[2])
while time.monotonic() < deadline:
    try:
        with open(f"/proc/{sys.argv[1]}/cmdline", "rb") as file:
            if not file.read(1):
                break
    except OSError:
        break
    time.sleep(0.001)
sys.stderr.write(words)
"""
_LATEST_S = 10.0
"""How long words wait for the end of a torchrun that waits for other ranks."""


def is_own_launcher() -> bool:
    """Return whether ``megatron train`` started this process, and will say why it ended."""
    return elastic_run_id().startswith(OWN_RUN_ID) and bool(launcher_error_file())


def leave_reason(reason: str) -> bool:
    """Write the reason to where the launcher reads it; return whether it could be written."""
    if not launcher_error_file():
        return False
    now = time.time_ns()
    extra = {"py_callstack": reason, "timestamp": str(now // 10**9), "time_ns": now}
    try:
        Path(launcher_error_file()).write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}))
    except OSError:
        return False
    return True


def say_last(lines: Sequence[str]) -> bool:
    """Have lines printed to standard error when torchrun has made its own report; return whether they will be.

    They will not be without torchrun, where its standard error is another, and where its end is that of a container.
    """
    import subprocess  # here alone: help and good command lines are answered without it

    launcher = None if is_own_launcher() else find_launcher(elastic_run_id())
    if launcher is None or min(launcher, parent_of(launcher)) <= 1 or not _shares_stderr(launcher):
        return False
    try:
        speaker = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SPEAKER, str(launcher), str(_LATEST_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert speaker.stdin is not None
        with speaker.stdin as words:
            words.write("".join(f"{line}\n" for line in lines))
    except (OSError, ValueError):
        return False
    return True


def _shares_stderr(pid: int) -> bool:
    try:
        return os.readlink("/proc/self/fd/2") == os.readlink(f"/proc/{pid}/fd/2")
    except OSError:
        return False
