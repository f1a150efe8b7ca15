"""Supervisor of a rank: a small process, which the launcher knows as the rank, restarts the rank's worker.

torchrun, and every launcher like it, ends all ranks when one dies. With the supervisor, a child of it dies instead.
The supervisor imports no torch: it starts workers, forwards signals, and waits. It also makes the folder in host
memory that holds the node's checkpoint copies.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import hashlib
import json
import mmap
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron.config import RunConfig
from megatron.core.console import print_line
from megatron.core.errors import ConfigurationError
from megatron.training import LaunchEnvironment, MeetingPoint, elastic_run_id, meeting_point, reasons_of, refuse_in_run
from megatron.training.fault_tolerance.processes import (
    KEEPER_NAME,
    ProcessIdentity,
    find_launcher,
    identify,
    name_process,
    wait_for_end,
)

_OWNER = "owner.json"


def make_copy_folder(base: Path, cleans_up: bool) -> Path:
    """Create the folder in ``base`` that the ranks of this launcher share, and return it.

    The rank that ``cleans_up`` starts a process that removes the folder when the launcher ends. It also removes the
    folders of launchers that ended without cleanup. Without a launcher the folder belongs to this process only.

    Raises:
        ConfigurationError: it cannot be created, or belongs to another user.
    """
    launcher = find_launcher(elastic_run_id())
    owner = identify(os.getpid() if launcher is None else launcher)
    prefix = f"megatron-{os.getuid()}-"
    identity = json.dumps(dataclasses.asdict(owner))
    folder = base / (prefix + hashlib.sha256(identity.encode()).hexdigest()[:12])
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(1, "it belongs to another user")
        own = folder / f"{_OWNER}.{os.getpid()}"
        own.write_text(identity)
        own.rename(folder / _OWNER)
    except OSError as error:
        raise ConfigurationError(
            f"--non-persistent-local-ckpt-dir {base}: cannot create {folder} ({error.strerror}); use a folder in host "
            "memory that this user can write to on each node"
        ) from error
    if cleans_up or launcher is None:
        _remove_left_over(base, prefix)
        _remove_at_end(folder, owner.pid)
    return folder


def _remove_left_over(base: Path, prefix: str) -> None:
    for folder in base.glob(f"{prefix}*"):
        try:
            owner = ProcessIdentity(**json.loads((folder / _OWNER).read_text()))
        except (OSError, ValueError, TypeError):
            continue
        if owner.is_alive is False:
            shutil.rmtree(folder, ignore_errors=True)


def _remove_at_end(folder: Path, launcher: int) -> None:
    """Start a process that waits for the launcher's end, independent of the ranks, and removes the folder."""
    if os.fork():
        return
    os.setsid()
    name_process("copies-cleaner")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        os.closerange(0, 3)  # readers of the run's output must not wait for this process
    wait_for_end(launcher)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


REPLACE = 75
"""Exit status of a worker that requests its replacement; a run that has ended returns 0, 1 or 2."""
_FINAL = (0, 1, 2)
_MOST_FRUITLESS = 10
"""A worker is not restarted after this many workers in a row completed no iteration."""
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
_HANDED_ON = (*_ENDING, signal.SIGUSR1, signal.SIGUSR2)
_PR_SET_PDEATHSIG = 1


class SharedCounts:
    """Two counters in memory that a supervisor shares with its workers; they outlive each worker."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, 16)
        self.note_saved(-1)

    @property
    def steps(self) -> int:
        return self._read(0)

    @property
    def saved(self) -> int | None:
        """Return the iteration of the newest checkpoint that this run has published, or None."""
        saved = self._read(8)
        return None if saved < 0 else saved

    def note_step(self) -> None:
        self._write(0, self.steps + 1)

    def note_saved(self, iteration: int) -> None:
        self._write(8, iteration)

    def _read(self, start: int) -> int:
        return int.from_bytes(self._memory[start : start + 8], sys.byteorder, signed=True)

    def _write(self, start: int, value: int) -> None:
        self._memory[start : start + 8] = value.to_bytes(8, sys.byteorder, signed=True)


@dataclass(frozen=True, eq=False)
class KeptRank:
    """Data that a worker gets from its supervisor: its index among the rank's workers, and the shared counters.

    ``folder`` is for in-memory checkpoint copies that outlive the worker, or None without them. ``started`` is the
    start time of the supervisor in seconds on the system clock.
    """

    num_predecessors: int
    counts: SharedCounts
    folder: Path | None
    started: float


def keep_rank(config: RunConfig, launch: LaunchEnvironment) -> KeptRank | None:
    """Become the supervisor of this rank, and return in each worker; return None without --inprocess-restart.

    The supervisor itself never returns: it ends with the status of its last worker. Call this before torch is imported
    and before threads are started that a worker needs. If the folder of the copies cannot be created, the program ends
    with status 2.
    """
    if not config.restart.inprocess_restart:
        return None
    point = meeting_point()
    if launch.rank == 0 and launch.world_size > 1 and point is not None and not point.is_kept_by_launcher:
        _start_store(point)
    folder = None
    if config.restart.non_persistent_save_interval is not None:
        try:
            base = Path(config.restart.non_persistent_local_ckpt_dir)
            folder = make_copy_folder(base, cleans_up=(launch.local_rank or 0) == 0)
        except ConfigurationError as error:
            sys.exit(refuse_in_run(reasons_of(error), launch))
    return _Keeper(launch.rank, folder).keep()


class _Keeper:
    def __init__(self, rank: int, folder: Path | None) -> None:
        self._rank = rank
        self._folder = folder
        self._started = time.time()
        self._worker = 0
        self._is_ending = False
        self._counts = SharedCounts()
        # Signals that the launcher ignores for a rank, as nohup does, are ignored by the supervisor too.
        self._before = {number: signal.getsignal(number) for number in _HANDED_ON}

    def keep(self) -> KeptRank:
        num_workers = fruitless = 0
        keeper = os.getpid()
        name_process(KEEPER_NAME)
        for number, handler in self._before.items():
            if handler != signal.SIG_IGN:
                signal.signal(number, self._hand_on)
        while True:
            steps = self._counts.steps
            _flush()
            # A signal between the fork and its return would be lost.
            signal.pthread_sigmask(signal.SIG_BLOCK, _HANDED_ON)
            self._worker = os.fork()
            if self._worker == 0:
                self._become_worker(keeper)
                return KeptRank(num_workers, self._counts, self._folder, self._started)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)
            status = os.waitstatus_to_exitcode(os.waitpid(self._worker, 0)[1])
            worker, self._worker = self._worker, 0
            num_workers += 1
            fruitless = 0 if self._counts.steps > steps else fruitless + 1
            if status in _FINAL or self._is_ending:
                _leave(status)
            said = f"rank {self._rank}: process {worker} {_how_it_ended(status)}"
            if fruitless >= _MOST_FRUITLESS:
                print_line(f"error: {said}, the {fruitless}th in a row before it completed an iteration", sys.stderr)
                _leave(1)
            print_line(f"WARNING: {said}; it is replaced and the run restarts", sys.stderr)

    def _hand_on(self, number: int, frame: FrameType | None) -> None:
        self._is_ending = self._is_ending or number in _ENDING
        if self._worker:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._worker, number)
        elif self._is_ending:
            _leave(-number)

    def _become_worker(self, keeper: int) -> None:
        """Undo the supervisor's set-up, and end when the supervisor ends."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        name_process(Path(sys.executable).name)
        _end_with(keeper)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _HANDED_ON)


def _start_store(point: MeetingPoint) -> None:
    """Start a process that hosts the store of a run whose launcher hosts none, until this process ends."""
    keeper = os.getpid()
    if os.fork():
        return
    name_process("rank-store")
    _end_with(keeper)
    from megatron.training.fault_tolerance.rendezvous import host_store

    host_store(point.host, point.port)


def _end_with(keeper: int) -> None:
    """Have the system kill this process when its supervisor ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != keeper:
        os.kill(os.getpid(), signal.SIGKILL)


def _how_it_ended(status: int) -> str:
    if status == REPLACE:
        return "has failed"
    if status > 0:
        return f"ended with status {status}"
    try:
        return f"was ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"was ended by signal {-status}"


def _leave(status: int) -> NoReturn:
    _flush()
    os._exit(status if status >= 0 else 128 - status)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader closed the pipe
            stream.flush()
