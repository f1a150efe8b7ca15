"""The reason why a process ends, where it is seen: in the launcher's error file, and as the last line of a run."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron.training.process.initialize import elastic_run_id, launcher_error_file
from megatron.training.process.launcher import find_launcher

OWN_RUN_ID = "megatron-"
"""How the number of a run begins whose ranks ``megatron train`` has started: it says last what went wrong."""

# torchrun prints its report of a failed process at its very end. What it was is printed once more, when the process has
# given up its memory: that is after its last word, and before anybody who waits for it goes on.
_REPEATER = """
import sys, time
words, deadline = sys.stdin.read(), time.monotonic() + 60
while time.monotonic() < deadline:
    try:
        with open(f"/proc/{sys.argv[1]}/cmdline", "rb") as file:
            if file.read(1):
                time.sleep(0.001)
                continue
    except OSError:
        pass
    sys.stderr.write(words)
    break
"""


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


def repeat_last(lines: Sequence[str]) -> None:
    """Have lines that were printed to standard error printed there again when torchrun has made its own report.

    Nothing happens without torchrun, and where its standard error is another.
    """
    import subprocess  # here alone: help and good command lines are answered without it

    launcher = None if is_own_launcher() else find_launcher(elastic_run_id())
    if launcher is None or not _shares_stderr(launcher):
        return
    with contextlib.suppress(OSError, ValueError):  # the lines have been printed once
        repeater = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _REPEATER, str(launcher)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert repeater.stdin is not None
        repeater.stdin.write("".join(f"{line}\n" for line in lines))
        repeater.stdin.close()


def _shares_stderr(pid: int) -> bool:
    try:
        return os.readlink("/proc/self/fd/2") == os.readlink(f"/proc/{pid}/fd/2")
    except OSError:
        return False
