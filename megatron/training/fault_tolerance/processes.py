"""Processes of a node: identity, state, termination, and the launcher that started this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.core.console import print_line

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDED_STATES = ("Z", "X")
_PR_SET_NAME = 15
KEEPER_NAME = "rank-keeper"
"""How the system names the process that starts a rank's worker again when it dies."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Name a process of some machine.

    ``machine`` is empty where the system does not say enough to tell machines, or containers, apart. ``started`` is in
    ticks since the machine's start.
    """

    host: str
    machine: str
    pid: int
    started: int

    @property
    def is_alive(self) -> bool | None:
        """Return whether the process runs; None where that cannot be seen from here."""
        # Copies of a virtual machine may have all but the host's name in common.
        if not self.machine or (self.machine, self.host) != (_machine(), socket.gethostname()):
            return None
        return start_time(self.pid) == self.started


def identify(pid: int) -> ProcessIdentity:
    """Return who a process of this machine is; one that is gone is not alive."""
    started = start_time(pid)
    return ProcessIdentity(socket.gethostname(), _machine(), pid, 0 if started is None else started)


def start_time(pid: int) -> int | None:
    """Return when a process of this machine started, in ticks; None where it has ended or nothing is known."""
    fields = _status(pid)
    return None if not fields or fields[0] in _ENDED_STATES else int(fields[19])


def parent_of(pid: int) -> int:
    """Return the number of a process's parent; 0 where it is not known."""
    fields = _status(pid)
    return int(fields[1]) if fields else 0


def name_of(pid: int) -> str:
    """Return the short name that the system has for a process; empty where it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def name_process(name: str) -> None:
    """Give this process a short name, which lists of processes show."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def _status(pid: int) -> list[str]:
    """Return the fields of a process's ``stat`` behind its name, which may hold any character."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _machine() -> str:
    """Return what the processes that can see each other have in common, and no others."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
    "D": "waiting for a disk",
}
GONE = "gone"


@dataclass(frozen=True)
class ProcessName:
    """Name one process for good: its machine, its number, and when it started, which tells it from a later one.

    ``host`` is for people; ``machine`` also tells apart containers that do not see each other's processes.
    """

    host: str
    machine: str
    pid: int
    started: int

    @property
    def is_here(self) -> bool:
        return self.machine == _this_machine()


UNKNOWN = ProcessName("an unknown host", "", 0, 0)
"""Stands for a process that has not said anything yet."""


def this_process() -> ProcessName:
    """Return the name of this process."""
    fields = _stat_fields(os.getpid())
    return ProcessName(socket.gethostname(), _this_machine(), os.getpid(), int(fields[19]) if fields else 0)


def state_of(name: ProcessName) -> str:
    """Return in words what the system says of a process of this machine: alive, stopped, gone; "" of another's."""
    if not name.is_here:
        return ""
    fields = _stat_fields(name.pid)
    if not fields or (name.started and int(fields[19]) != name.started):
        return GONE
    return _STATES.get(fields[0], "alive")


def is_silent_for_good(state: str) -> bool:
    """Return whether a process in this state will say nothing any more, unless somebody continues it."""
    return state in (_STATES["T"], _STATES["Z"], GONE)


def is_at_an_end(state: str) -> bool:
    return state in (_STATES["Z"], GONE)


def kill(name: ProcessName) -> None:
    """End a process of this machine and this user at once; do nothing where it is not the one that was named."""
    if state_of(name) in ("", GONE) or name.pid == os.getpid():
        return
    try:
        if os.stat(f"/proc/{name.pid}").st_uid == os.getuid():
            os.kill(name.pid, signal.SIGKILL)
    except OSError:
        return


def bytes_moved() -> int:
    """Return how many bytes this process has read and written so far; 0 where the system does not say."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _stat_fields(pid: int) -> list[str]:
    """Return what follows the name in ``/proc/PID/stat``: the state, ..., the start time as number 19."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _this_machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


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
