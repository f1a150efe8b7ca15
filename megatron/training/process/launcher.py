"""The launcher that started this process, which the process does not outlive for long."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from pathlib import Path

from megatron.training.process.console import print_line
from megatron.training.process.process_identity import identify, parent_of

GRACE_S = 8.0
"""Time for the step and the checkpoint that a process may finish when its launcher is gone."""
_POLL_INTERVAL_S = 0.5
_PR_SET_PDEATHSIG = 1


def find_launcher(run_id: str) -> int | None:
    """Return the process that started this one with ``run_id``; None without one, or where it cannot be seen.

    torchrun gives each process the run's number in the environment and has none itself: of the parents, shells between
    the two among them, the launcher is the first one that was started without it.
    """
    if not run_id:
        return None
    pid = os.getppid()
    while pid > 1 and _was_started_with(pid, run_id):
        pid = parent_of(pid)
    return pid or None


def die_with_launcher(run_id: str, rank: int) -> None:
    """Let this process end soon after the torchrun that started it, however that ends.

    It gets SIGTERM at once, which a run in training answers with a checkpoint, and SIGKILL after `GRACE_S`. A
    process that was started in any other way has no ``run_id`` and is left alone, whatever becomes of its parent.
    """
    launcher = find_launcher(run_id)
    if launcher is None:
        return
    if launcher == os.getppid():
        _ask_for_signal_at_death()
        if launcher != os.getppid():  # it ended before it was asked
            os.kill(os.getpid(), signal.SIGTERM)
    if _adopts_orphans(launcher):
        sys.exit("error: the launcher of this process is gone; start the run again")
    threading.Thread(target=_end_after, args=(launcher, rank), name="launcher watch", daemon=True).start()


def _end_after(launcher: int, rank: int) -> None:
    wait_for_end(launcher)
    deadline = time.monotonic() + GRACE_S
    os.kill(os.getpid(), signal.SIGTERM)
    if rank == 0:
        with contextlib.suppress(OSError):  # the launcher may have been the reader
            print_line(
                f"WARNING: the launcher (process {launcher}) is gone: this run ends within {GRACE_S:.0f} s, with a "
                "checkpoint where it can",
                sys.stderr,
            )
    time.sleep(max(deadline - time.monotonic(), 0.0))
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_end(pid: int) -> None:
    """Return when a process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # an older system, or another one
        _poll_for_end(pid)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.close(descriptor)


def _poll_for_end(pid: int) -> None:
    process, parent = identify(pid), os.getppid()
    while process.is_alive or (process.is_alive is None and os.getppid() == parent):
        time.sleep(_POLL_INTERVAL_S)


def _ask_for_signal_at_death() -> None:
    """Have the system send SIGTERM when the thread that started this process ends; Linux can."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _was_started_with(pid: int, run_id: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"TORCHELASTIC_RUN_ID={run_id}".encode() in environment.split(b"\0")


def _adopts_orphans(pid: int) -> bool:
    """Return whether a parent is the system's, which takes over processes whose own is gone.

    In a container the launcher itself may be process 1, which is then a Python.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return False
    is_python = any(b"python" in word or b"torchrun" in word for word in words[:2])
    return not is_python and (pid == 1 or name == "systemd")
