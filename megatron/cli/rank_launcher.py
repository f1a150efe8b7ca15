"""Launcher that starts and monitors the ranks of a run on this node, and reports a failure in one message."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from megatron.core.console import print_line, waiting
from megatron.core.errors import ConfigurationError
from megatron.training import OWN_RUN_ID
from megatron.training.fault_tolerance import HANG_PREFIX

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing import PContext

_POLL_S = 0.1
_BY_SIGNAL = 128
INTERRUPTED = _BY_SIGNAL + signal.SIGINT
"""Exit status after Ctrl-C, as shells report it."""
_STOPPING = (
    "stopping after this step, with a checkpoint if --save is set; press Ctrl-C again to end the run immediately"
)


@dataclass(frozen=True)
class Place:
    """Number of ranks of a run, and the position of this node.

    ``master_port`` 0 selects a free port, which works only for a run on one node.
    """

    nproc: int = 1
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0

    @property
    def world_size(self) -> int:
        return self.nproc * self.nnodes


class Stop:
    """Handler of the signals that end a run: the first lets the ranks save and exit, a second Ctrl-C kills them.

    A scheduler may send SIGTERM several times, so only Ctrl-C counts as the second signal.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids
        self.received: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            self._send(signal.SIGKILL)
            os._exit(_BY_SIGNAL + number)
        if self.received is None:
            self.received = number
            if number == signal.SIGINT:
                print_line(f"\n{_STOPPING}", sys.stderr)
            self._send(signal.SIGTERM)

    def _send(self, number: int) -> None:
        for pid in self._pids:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue


def launch(script: Path, words: Sequence[str], place: Place) -> int:
    """Run a script on the ranks of this node and return the exit status of the first rank that failed, or 0.

    The last printed line gives the reason of the failure. If a signal ended the run and its ranks saved and exited
    normally, the status is `INTERRUPTED` for Ctrl-C, and 0 for other signals.

    Raises:
        ConfigurationError: the ranks cannot rendezvous at the given address.
    """
    with tempfile.TemporaryDirectory(prefix="megatron-train-") as folder:
        # Importing torch takes some seconds.
        with waiting(f"starting {place.nproc} process{'es' if place.nproc > 1 else ''}", prints=True):
            from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, start_processes

            logging.disable(logging.ERROR)  # the library logs every process that it ends
            store = _open_store(place)
            if store is not None:
                place = Place(place.nproc, place.nnodes, place.node_rank, place.master_addr, store.port)
            run_id = OWN_RUN_ID + uuid.uuid4().hex
            ranks = range(place.nproc)
            context = start_processes(
                name="rank",
                entrypoint=sys.executable,
                args={rank: ("-u", str(script), *words) for rank in ranks},
                envs={rank: _environment(place, rank, run_id) for rank in ranks},
                logs_specs=DefaultLogsSpecs(log_dir=folder),
            )
        return _watch(context, place)


def _watch(context: PContext, place: Place) -> int:
    pids = context.pids()
    stop, result = Stop(tuple(pids.values())), None
    while result is None:
        time.sleep(_POLL_S)
        # Ranks that are still running here fail later only because the library ends them after these failures.
        first = {rank for rank, pid in pids.items() if _has_ended(pid)}
        result = context.wait(timeout=0)
    if not result.failures:
        return INTERRUPTED if stop.received == signal.SIGINT else 0
    hung = {rank: failure for rank, failure in result.failures.items() if _reason(failure).startswith(HANG_PREFIX)}
    failures = {rank: failure for rank, failure in result.failures.items() if rank in first} or result.failures
    rank, failure = min((hung or failures).items(), key=lambda item: _order(item[1]))
    # The watchdog kills ranks that cannot end themselves; schedulers read the status of SIGKILL as out of memory.
    status = 1 if hung else int(failure.exitcode)
    if stop.received is not None and status == -signal.SIGTERM:
        return _BY_SIGNAL + stop.received  # the rank had not installed its signal handler yet
    for line in _describe(place.node_rank * place.nproc + rank, failure):
        print_line(line, sys.stderr)
    return status if status > 0 else _BY_SIGNAL - status


def _has_ended(pid: int) -> bool:
    """Return whether a rank has ended, without reaping the process, which the library does."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:
        return True


def _order(failure: Any) -> tuple[int, float]:
    """Return a sort key: first killed ranks, which make others fail, then by time those with an error message."""
    extra = _extra(failure)
    if extra is not None:
        return 1, float(extra.get("time_ns", int(extra["timestamp"]) * 10**9))
    return (0, 0.0) if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM else (2, 0.0)


def _extra(failure: Any) -> dict[str, Any] | None:
    message = failure.error_file_data.get("message")
    return message["extraInfo"] if isinstance(message, dict) else None


def _reason(failure: Any) -> str:
    """Return the reason that a rank, or the watchdog for it, left in its error file; empty if there is none."""
    return "" if _extra(failure) is None else str(failure.error_file_data["message"]["message"])


def _describe(rank: int, failure: Any) -> list[str]:
    if reason := _reason(failure):
        return reason.splitlines()
    if failure.exitcode >= 0:
        return [f"error: rank {rank} (process {failure.pid}) ended with status {failure.exitcode}"]
    name = signal.Signals(-failure.exitcode).name
    hint = "; the system does this if memory runs out (see dmesg)" if name == "SIGKILL" else ""
    return [f"error: rank {rank} (process {failure.pid}) was ended by {name}{hint}"]


def _open_store(place: Place) -> Any:
    """Open the store for the rendezvous of the ranks on the first node; None on other nodes."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    if place.node_rank != 0:
        return None
    try:
        return TCPStore(place.master_addr, place.master_port, is_master=True, wait_for_workers=False)
    except (RuntimeError, ValueError) as error:
        raise ConfigurationError(
            f"--master-addr {place.master_addr} --master-port {place.master_port}: the ranks cannot connect there "
            f"({str(error).splitlines()[0]}); use an address of the first node and a free port"
        ) from error


def _environment(place: Place, local_rank: int, run_id: str) -> dict[str, str]:
    """Return the environment variables of a rank, with torchrun's names."""
    rank = place.node_rank * place.nproc + local_rank
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "GROUP_RANK": str(place.node_rank),
        "WORLD_SIZE": str(place.world_size),
        "LOCAL_WORLD_SIZE": str(place.nproc),
        "MASTER_ADDR": place.master_addr,
        "MASTER_PORT": str(place.master_port),
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
