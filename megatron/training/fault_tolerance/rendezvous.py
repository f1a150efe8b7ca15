"""Rendezvous: the members of a generation, its process groups, and how they are aborted.

A generation is one set of processes, one for each rank, that share process groups. It is over for all when one of them
has died or left. The store holds the number of the generation that all ranks must join next. A rank that sees that a
generation is over increments it. A rank that waits in gloo for a rank that has left gets no error, so the sockets of
the groups are shut down, and every wait on them ends. A wait in shared memory ends when communication is given up.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch.distributed as dist

from megatron.core.errors import MegatronError
from megatron.core.flight_recorder import FlightRecorder, GivenUpError

_PREFIX = "megatron/restart"
_WANTED, _LIST, _DONE = f"{_PREFIX}/wanted", f"{_PREFIX}/list", f"{_PREFIX}/done"
_POLL_S = 0.05


class RestartError(MegatronError):
    """A run cannot be restarted."""


class Store(Protocol):
    """Key-value store that all processes of a run can reach, and that outlives them."""

    def set(self, key: str, value: str) -> None:
        """Write a value."""

    def get(self, key: str) -> bytes:
        """Return the value of a key that exists."""

    def check(self, keys: list[str]) -> bool:
        """Return whether all keys exist."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a value if the key has the expected one, or if it does not exist and nothing is expected."""


@dataclass(frozen=True)
class Generation:
    """Set of processes, by rank, that share process groups; ``name`` is unique."""

    number: int
    members: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{_PREFIX}/{self.number}.{self.members[0]}"


@dataclass(frozen=True)
class Limits:
    """Timeout of the rendezvous, and the maximum number of generations after the first."""

    patience_s: float
    max_restarts: int | None = None


class Rendezvous:
    """Rendezvous with the other processes of a run; ``token`` distinguishes this process from its predecessors."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        token: str,
        limits: Limits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._token = token
        self._limits = limits
        self._clock = clock
        store.compare_set(_WANTED, "", "0")

    @property
    def wanted(self) -> int:
        return int(self._store.get(_WANTED))

    def is_over(self, generation: Generation) -> bool:
        return self.wanted != generation.number

    def end(self, number: int) -> None:
        """Ask all ranks to leave a generation, unless one has already done so."""
        self._store.compare_set(_WANTED, str(number), str(number + 1))

    def note_done(self, generation: Generation) -> None:
        """Mark the work of a generation as done, for processes that join later."""
        self._store.set(_DONE, generation.name)

    def join(self) -> Generation | None:
        """Wait until all processes have joined and return their generation, or None if the work is done.

        Raises:
            RestartError: not all have joined in time, or there were too many generations.
        """
        deadline = self._clock() + self._limits.patience_s
        while True:
            generation = self._try(self.wanted)
            if generation is not None:
                return None if self._is_done(generation) else generation
            if self._clock() > deadline:
                raise RestartError(self._too_late())
            time.sleep(_POLL_S)

    def _try(self, number: int) -> Generation | None:
        """Register this process for a generation; return the generation if all have registered."""
        limit = self._limits.max_restarts
        if limit is not None and number > limit:
            raise RestartError(
                f"the run has failed {number} times and ends, because --inprocess-max-iterations is {limit}"
            )
        listed = self._listed(number)
        if listed is not None and self._is_done(listed):
            return listed
        entered = self._entered(self._rank)
        if entered is not None and entered[0] == number and entered[1] != self._token:
            self.end(number)
            return None
        if entered != (number, self._token):
            self._store.set(self._key(self._rank), json.dumps([number, self._token]))
        if listed is None and self._rank == 0:
            found = [self._entered(rank) for rank in range(self._world_size)]
            names = [name for each in found if each is not None for at, name in [each] if at == number]
            if len(names) == self._world_size:
                listed = Generation(number, tuple(names))
                self._store.set(_LIST, json.dumps([number, names]))
        if listed is None:
            return None
        if len(listed.members) != self._world_size or listed.members[self._rank] != self._token:
            self.end(number)
            return None
        return listed

    def _is_done(self, generation: Generation) -> bool:
        return self._store.check([_DONE]) and self._store.get(_DONE).decode() == generation.name

    def _listed(self, number: int) -> Generation | None:
        if not self._store.check([_LIST]):
            return None
        at, names = json.loads(self._store.get(_LIST))
        return Generation(at, tuple(names)) if at == number else None

    def _entered(self, rank: int) -> tuple[int, str] | None:
        if not self._store.check([self._key(rank)]):
            return None
        number, token = json.loads(self._store.get(self._key(rank)))
        return number, token

    def _key(self, rank: int) -> str:
        return f"{_PREFIX}/rank/{rank}"

    def _too_late(self) -> str:
        wanted = self.wanted
        missing = [
            rank for rank in range(self._world_size) if (entered := self._entered(rank)) is None or entered[0] != wanted
        ]
        return (
            f"{_ranks(missing)} did not join within {self._limits.patience_s:g} s, the time limit at a start and a "
            "restart; check their own messages, or use a longer --inprocess-barrier-timeout"
        )


def _ranks(missing: list[int]) -> str:
    if not missing:
        return "rank 0 has not listed the ranks: it"
    shown = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    return f"{'rank' if len(missing) == 1 else 'ranks'} {shown}"


_STORE_TIMEOUT = timedelta(minutes=5)
_DESCRIPTORS = Path("/proc/self/fd")


class GroupLinks:
    """Sockets of the process groups that are created between `__init__` and `are_made`."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._own: set[str] | None = None
        self._flight: FlightRecorder | None = None

    def are_made(self, flight: FlightRecorder) -> None:
        """Record that all groups exist: sockets that are opened from now on do not belong to them.

        ``flight`` is notified before the groups are shut down.
        """
        self._own = set(_sockets()) - set(self._before)
        self._flight = flight

    @property
    def are_given_up(self) -> bool:
        """Return whether the groups have been shut down, or are about to be."""
        return self._flight is not None and self._flight.is_given_up

    def shut_down(self) -> None:
        """End every wait on the groups in any thread: with an error, or under NCCL with invalid results.

        Code that reads these results must call `FlightRecorder.ensure_not_given_up` afterwards.
        """
        if self._flight is not None:
            self._flight.give_up()
        for name, descriptor in _sockets().items():
            if name not in self._before if self._own is None else name in self._own:
                _shut_down(descriptor)
        abort_communicators()


def abort_communicators() -> None:
    """Abort pending NCCL operations in all groups; gloo needs no abort."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


def leave_groups() -> None:
    """Destroy all process groups, after a shut-down."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_broken_communication(error: BaseException) -> bool:
    """Return whether an error means that another rank was unreachable, or that waiting for it timed out."""
    if isinstance(error, dist.DistError | GivenUpError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(name in text for name in ("gloo", "NCCL", "Connection closed"))


def open_store(host: str, port: int, timeout: timedelta = _STORE_TIMEOUT) -> Any:
    """Open a separate connection to the launcher's store.

    Raises:
        RuntimeError: it cannot be reached.
    """
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]


def host_store(host: str, port: int) -> NoReturn:
    """Host the store of a run for the lifetime of this process."""
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    while store is not None:
        signal.pause()


def store_of(generation: Generation, store: Any) -> Any:
    return dist.PrefixStore(generation.name, store)  # type: ignore[attr-defined]


def _sockets() -> dict[str, int]:
    """Return this process's sockets: one descriptor per socket, by the system's name of it."""
    found = {}
    for path in _DESCRIPTORS.iterdir():
        try:
            name = os.readlink(path)
        except FileNotFoundError:
            continue
        if name.startswith("socket:"):
            found[name] = int(path.name)
    return found


def _shut_down(descriptor: int) -> None:
    try:
        with socket.socket(fileno=os.dup(descriptor)) as connection:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # it is listening, or already closed
        return
