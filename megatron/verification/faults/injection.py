"""Faults and their injection: signals, limits, corrupt bytes and dropped TCP connections.

Dropping connections does not change the network. This process duplicates the other's sockets (Linux 5.6 or newer, with
the rights of a debugger) and shuts them down, so both ends of each connection are notified.
"""

from __future__ import annotations

import ctypes
import errno
import math
import os
import random
import resource
import signal
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from megatron.checkpoint import complete_iterations, iteration_folder
from megatron.core.errors import ConfigurationError
from megatron.verification.faults.launch import Launch, send
from megatron.verification.faults.spoiled_script import GRADIENT_SIGNAL, WEIGHT_SIGNAL

Kind = Literal["kill", "stop", "slow", "corrupt", "fill-disk", "partition"]

ANY = "any"
EVERYBODY = ("all", "launcher")
CORRUPTIBLE = ("checkpoint", "sample", "weight", "gradient")
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


@dataclass(frozen=True)
class Fault:
    """Fault of a kind and a target as on the command line; ``factor`` is the slowdown of a rank."""

    kind: Kind
    target: str
    factor: float = 1.0

    def __str__(self) -> str:
        """Return the flag that requests this fault."""
        words = self.target if self.kind != "slow" else f"{self.target}:{self.factor:g}"
        return f"--{self.kind} {words}".rstrip()

    @property
    def needs_peers(self) -> bool:
        """Return whether a single rank would not notice the fault."""
        return self.kind in ("stop", "partition")

    @property
    def is_inside(self) -> bool:
        """Return whether the process itself injects the fault, when it gets a signal."""
        return self.kind == "corrupt" and self.target in ("weight", "gradient")

    @property
    def ends_run(self) -> bool:
        """Return whether the fault ends the run; otherwise the run continues during the fault and after it."""
        return self.kind not in ("slow", "fill-disk")

    def rank(self, ranks: Sequence[int], rng: random.Random) -> int | None:
        """Return the affected rank, drawn at random for any, or None if the fault affects no particular rank.

        Raises:
            ConfigurationError: there is no such rank on this node, or it has no peers.
        """
        if self.needs_peers and len(ranks) < 2:
            raise ConfigurationError(
                f"{self}: no other rank waits for the only rank of this run; use two or more ranks"
            )
        if self.target in EVERYBODY or (self.kind == "corrupt" and not self.is_inside) or self.kind == "fill-disk":
            return None
        if self.target == ANY or self.is_inside:
            return rng.choice(ranks)
        if int(self.target) not in ranks:
            here = ", ".join(map(str, ranks))
            raise ConfigurationError(f"{self}: there is no rank {self.target} in this run; use one of: {here}")
        return int(self.target)

    def statuses(self, has_launcher: bool) -> tuple[int, ...]:
        """Return the documented exit statuses of the command after this fault.

        torchrun always exits with 1. A run continues while a disk is full, and fails only if the disk is full at its
        end.
        """
        if self.kind == "slow":
            return ()
        is_kill = self.kind == "kill" or (self.kind, self.target) == ("corrupt", "checkpoint")
        if is_kill and (self.target == "launcher" or not has_launcher):
            return _KILLED
        return (2,) if self == Fault("corrupt", "sample") and not has_launcher else (1,)

    def last_words(self, rank: int | None) -> str:
        """Return the documented prefix of the line that is printed when the fault ends the run, or an empty string."""
        if self.kind == "stop":
            return f"HANG: rank {rank} "
        return "error: " if self.kind == "corrupt" and self.target != "checkpoint" else ""


def parse_fault(kind: Kind, text: str) -> Fault:
    """Parse a flag's value into a fault.

    Raises:
        ConfigurationError: the value names no fault.
    """
    if kind == "corrupt":
        if text not in CORRUPTIBLE:
            raise ConfigurationError(f"--corrupt {text} is not one of {', '.join(CORRUPTIBLE)}")
        return Fault(kind, text)
    target, colon, number = text.partition(":") if kind == "slow" else (text, "", "")
    others = (ANY, *(EVERYBODY if kind == "kill" else ()))
    if target not in others and not (target.isascii() and target.isdigit() and len(target) < 10):
        raise ConfigurationError(f"--{kind} {text} is not a rank; use a number, or {' or '.join(others)}")
    target = target if target in others else str(int(target))
    if kind != "slow":
        return Fault(kind, target)
    try:
        factor = float(number)
    except ValueError:
        factor = math.nan
    if not (colon and 1.0 < factor <= 1000.0):
        raise ConfigurationError(
            f"--slow {text} is not RANK:FACTOR with a factor above 1 and of at most 1000, as in 1:3"
        )
    return Fault(kind, target, factor)


_PIDFD_GETFD = 438


def drop_connections(pid: int) -> int:
    """Shut down every established TCP connection of a process and return their number.

    Raises:
        ConfigurationError: this system does not allow one process to do that to another.
    """
    process = os.pidfd_open(pid)
    try:
        return sum(_shut_down(process, int(path.name)) for path in _sockets(pid))
    finally:
        os.close(process)


def _sockets(pid: int) -> list[Path]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(path).startswith("socket:"):
                found.append(path)
        except FileNotFoundError:
            continue
    return found


def _shut_down(process: int, descriptor: int) -> bool:
    library = ctypes.CDLL(None, use_errno=True)
    borrowed: int = library.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if borrowed < 0:
        if ctypes.get_errno() in (errno.EBADF, errno.ESRCH):  # the process has closed it or has ended
            return False
        reason = os.strerror(ctypes.get_errno())
        raise ConfigurationError(
            f"--partition: this system does not allow access to the sockets of another process ({reason}); in a "
            "container add CAP_SYS_PTRACE, or omit --partition"
        )
    with socket.socket(fileno=borrowed) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        try:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it is listening, or already closed
            return False
        return True


SLICE_S = 0.05
ROOM_BYTES = 64 * 1024


class Injection:
    """Injection of one fault into a running launch; lasting effects are reverted by `undo`.

    Raises:
        ConfigurationError: the fault is impossible in this run, or on this system.
    """

    def __init__(
        self, fault: Fault, launch: Launch, folder: Path, token_files: tuple[Path, ...], rng: random.Random
    ) -> None:
        self.fault = fault
        self.damaged: int | None = None
        self._ranks = launch.ranks()
        self.rank = fault.rank(sorted(self._ranks), rng)
        self.has_launcher = launch.process.pid not in self._ranks.values()
        self._over = threading.Event()
        self._slicing: threading.Thread | None = None
        self._whole: dict[Path, bytes] = {}
        self._begin(launch, folder, token_files, rng)

    def _begin(self, launch: Launch, folder: Path, token_files: tuple[Path, ...], rng: random.Random) -> None:
        pids = [pid for rank, pid in self._ranks.items() if self.rank in (None, rank)]
        match self.fault.kind, self.fault.target:
            case "kill", "launcher":
                send(launch.process.pid, signal.SIGKILL)
            case "kill", _:
                _send_all(pids, signal.SIGKILL)
            case "stop", _:
                _send_all(pids, signal.SIGSTOP)
            case "slow", _:
                self._slicing = threading.Thread(target=self._stop_in_slices, args=(pids,), daemon=True)
                self._slicing.start()
            case "fill-disk", _:
                logs = (launch.output, folder / "metrics.jsonl")
                self._limit_files(max(path.stat().st_size for path in logs if path.exists()) + ROOM_BYTES)
            case "partition", _:
                if not sum(drop_connections(pid) for pid in pids):
                    raise ConfigurationError(f"{self.fault}: rank {self.rank} has no TCP connection")
            case "corrupt", "weight":
                _send_all(pids, WEIGHT_SIGNAL)
            case "corrupt", "gradient":
                _send_all(pids, GRADIENT_SIGNAL)
            case "corrupt", "sample":
                for path in token_files:
                    self._whole[path] = path.read_bytes()
                    _overwrite(path, b"\xff" * len(self._whole[path]))
            case _:
                _send_all(pids, signal.SIGKILL)
                launch.wait(60.0)
                self.damaged = _damage_newest(folder / "checkpoints", rng)

    def undo(self) -> None:
        """Revert lasting effects: slowness, full disks, and corrupt data."""
        self._over.set()
        if self._slicing is not None:
            self._slicing.join()
        if self.fault.kind == "fill-disk":
            self._limit_files(resource.RLIM_INFINITY)
        for path, content in self._whole.items():
            _overwrite(path, content)

    def _stop_in_slices(self, pids: list[int]) -> None:
        """Let processes run for only a part of each time slice."""
        running_s = SLICE_S / self.fault.factor
        while not self._over.wait(running_s):
            _send_all(pids, signal.SIGSTOP)
            self._over.wait(SLICE_S - running_s)
            _send_all(pids, signal.SIGCONT)

    def _limit_files(self, size: int) -> None:
        for pid in self._ranks.values():
            try:
                hard = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
                soft = size if hard == resource.RLIM_INFINITY else min(size, hard) if size >= 0 else hard
                resource.prlimit(pid, resource.RLIMIT_FSIZE, (soft, hard))
            except ProcessLookupError:
                continue


def _send_all(pids: list[int], number: int) -> None:
    for pid in pids:
        send(pid, number)


def _overwrite(path: Path, content: bytes) -> None:
    """Overwrite the bytes of a file that other processes have open or mapped."""
    with path.open("r+b") as file:
        file.write(content)


def _damage_newest(checkpoints: Path, rng: random.Random) -> int | None:
    """Flip one byte in the newest checkpoint's largest file, if there is an older checkpoint; return its iteration."""
    iterations = complete_iterations(checkpoints)
    if len(iterations) < 2:
        return None
    files = [path for path in iteration_folder(checkpoints, iterations[-1]).rglob("*") if path.is_file()]
    path = max(files, key=lambda item: item.stat().st_size)
    place = rng.randrange(path.stat().st_size)
    with path.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)
        file.seek(place)
        file.write(bytes([byte[0] ^ 0xFF]))
    return iterations[-1]
