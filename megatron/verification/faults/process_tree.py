"""The processes of a command on this machine: all that it started, and which of them are ranks."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterable
from pathlib import Path

from megatron.training.fault_tolerance.processes import KEEPER_NAME, ProcessIdentity, identify, name_of, parent_of


def descendants(root: int) -> list[int]:
    """Return the processes below one, parents before their children."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(parent_of(int(name)), []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def ranks_of(root: int) -> dict[int, int]:
    """Return the processes of the ranks that a command runs here, by rank.

    A rank is what has ``RANK`` in its environment and whose parent has not, or is a rank's keeper. A command that
    started none is rank 0.
    """
    processes = [pid for pid in descendants(root) if name_of(pid) != KEEPER_NAME]
    numbers = {pid: number for pid in processes if (number := _rank_variable(pid)) is not None}
    ranks = {number: pid for pid, number in numbers.items() if parent_of(pid) not in numbers}
    return ranks or {0: root}


def identities(pids: Iterable[int]) -> set[ProcessIdentity]:
    """Return who processes are that still run."""
    return {who for who in map(identify, pids) if who.is_alive}


def send(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def end_all(processes: Iterable[ProcessIdentity]) -> None:
    """Kill those that still run."""
    for process in processes:
        if process.is_alive:
            send(process.pid, signal.SIGKILL)


def _rank_variable(pid: int) -> int | None:
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    values = [value for value in variables if value.startswith(b"RANK=")]
    return int(values[0][5:]) if values and values[0][5:].isdigit() else None
