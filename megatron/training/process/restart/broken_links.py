"""The links of one generation of process groups, which can be broken from outside so that nobody waits on.

A rank that waits for a dead one over gloo is told by its socket; one that waits for a rank that has left is not, and
gloo has nothing by which to give up. So the sockets that were opened for the groups are shut down, and every wait on
them ends with an error. NCCL's communicators are aborted.
"""

from __future__ import annotations

import os
import signal
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

import torch.distributed as dist

from megatron.core.flight_recorder import FlightRecorder, GivenUpError
from megatron.training.process.restart.rendezvous import Generation

_STORE_TIMEOUT = timedelta(minutes=5)
_DESCRIPTORS = Path("/proc/self/fd")


class GroupLinks:
    """Know the sockets of the process groups that are made between `__init__` and `are_made`."""

    def __init__(self) -> None:
        self._before = _sockets()
        self._own: set[str] | None = None
        self._flight: FlightRecorder | None = None

    def are_made(self, flight: FlightRecorder) -> None:
        """Note that all groups exist: sockets that are opened from now on belong to others.

        ``flight`` is told before the groups are shut down.
        """
        self._own = set(_sockets()) - set(self._before)
        self._flight = flight

    @property
    def are_given_up(self) -> bool:
        """Return whether groups that were made have been shut down, or are about to be."""
        return self._flight is not None and self._flight.is_given_up

    def shut_down(self) -> None:
        """End every wait on the groups, in whichever thread: with an error, or on NCCL with numbers that say nothing.

        Who reads those asks `FlightRecorder.ensure_not_given_up` afterwards.
        """
        if self._flight is not None:
            self._flight.give_up()
        for name, descriptor in _sockets().items():
            if name not in self._before if self._own is None else name in self._own:
                _shut_down(descriptor)
        abort_communicators()


def abort_communicators() -> None:
    """Give up what NCCL has under way in any group; gloo has no such thing."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        dist.distributed_c10d._abort_process_group()


def leave_groups() -> None:
    """Leave all process groups, after a shut-down."""
    if dist.is_initialized():
        dist.destroy_process_group()


def is_broken_communication(error: BaseException) -> bool:
    """Return whether an error says that another rank could not be reached, or was waited for in vain."""
    if isinstance(error, dist.DistError | GivenUpError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and any(name in text for name in ("gloo", "NCCL", "Connection closed"))


def open_store(host: str, port: int, timeout: timedelta = _STORE_TIMEOUT) -> Any:
    """Return a connection of its own to the store that the launcher keeps.

    Raises:
        RuntimeError: it cannot be reached.
    """
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)  # type: ignore[attr-defined]


def host_store(host: str, port: int) -> NoReturn:
    """Keep the store of a run for as long as this process lives."""
    store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]
    while store is not None:
        signal.pause()


def store_of(generation: Generation, store: Any) -> Any:
    """Return the part of a store in which the groups of a generation meet."""
    return dist.PrefixStore(generation.name, store)  # type: ignore[attr-defined]


def _sockets() -> dict[str, int]:
    """Return this process's sockets: a descriptor of each, by the name that the system has for it."""
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
    except OSError:  # it listens, or is over
        return
