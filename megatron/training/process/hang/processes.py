"""What a machine says of the processes of a run, and the end of one that cannot end itself."""

from __future__ import annotations

import os
import signal
import socket
from dataclasses import dataclass
from pathlib import Path

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
        """Return whether it is a process of this machine."""
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
    """Return whether a process in this state runs no more and never will."""
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
