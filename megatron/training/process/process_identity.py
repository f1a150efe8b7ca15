"""Who a process is: told apart from a later one with its number, and asked whether it still runs."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

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
