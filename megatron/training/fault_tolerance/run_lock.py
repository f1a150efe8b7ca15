"""Lock of a folder or file: only the run that holds it may write there, and it renews its record."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from megatron.core.errors import ConfigurationError
from megatron.core.object_store import ObjectPath
from megatron.core.safe_io import parse_json, read_plain_text
from megatron.training import elastic_run_id
from megatron.training.fault_tolerance.processes import (
    ProcessIdentity,
    ProcessName,
    find_launcher,
    identify,
    state_of,
)

FOLDER_RECORD = ".owner"
_POLL_INTERVAL_S = 0.2
_ENDING_S = 30.0


class FolderInUseError(ConfigurationError):
    """Another run writes to the folder or file."""


@dataclass(frozen=True)
class OwnerTimes:
    """Renewal interval of a record, and the time after which an unreachable owner is considered dead.

    ``ending_s`` is the wait for an owner whose launcher is gone.
    """

    renewed_every_s: float = 15.0
    expired_after_s: float = 90.0
    ending_s: float = 20.0


@dataclass(frozen=True)
class OwnerRecord:
    """Record of the process that holds a run lock.

    The record names the process, its launcher (the owner ends when the launcher ends), the purpose, and the time of the
    lock in seconds since 1970 by the owner's clock.
    """

    process: ProcessIdentity
    launcher: ProcessIdentity | None
    token: str
    purpose: str
    since: float = 0.0

    @classmethod
    def of_this_process(cls, token: str, purpose: str) -> OwnerRecord:
        launcher = find_launcher(elastic_run_id())
        return cls(identify(os.getpid()), None if launcher is None else identify(launcher), token, purpose, time.time())

    @classmethod
    def read(cls, path: Path) -> OwnerRecord | None:
        """Read a record, or return None if the file has no complete record."""
        try:
            content = parse_json(read_plain_text(path))
            process, launcher = content["process"], content["launcher"]
            return cls(
                ProcessIdentity(**process),
                None if launcher is None else ProcessIdentity(**launcher),
                str(content["token"]),
                str(content["purpose"]),
                float(content.get("since", 0.0)),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def is_of_this_process(self) -> bool:
        """Return whether this process wrote it, for an earlier run."""
        return self.process.is_alive is True and self.process.pid == os.getpid()

    @property
    def is_ending(self) -> bool:
        """Return whether the owner still runs although its launcher has ended."""
        return self.process.is_alive is True and self.launcher is not None and self.launcher.is_alive is False

    def describe(self) -> str:
        """Describe the owner in words."""
        return f"{self.purpose} on {self.process.host}, process {self.process.pid}"


class RunLock:
    """Ownership of a folder, or of a file in it, from `own_folder` until `release`; a thread renews the record.

    Records are numbered, and the newest one belongs to the owner. A process takes a number by creating its file, which
    only one process can do. No process takes a number while a record with a lower one may be alive.
    """

    def __init__(self, path: Path, record: OwnerRecord, given: str, times: OwnerTimes) -> None:
        self._path = path
        self._record = record
        self._given = given
        self._released = threading.Event()
        self._thread = threading.Thread(
            target=self._renew, args=(times.renewed_every_s,), name="folder owner", daemon=True
        )
        self._thread.start()

    def check(self) -> None:
        """Check that this run still owns the folder; call this before any change in the folder.

        Raises:
            FolderInUseError: another run considered this one dead and took the folder over.
        """
        directory, prefix = self._path.parent, self._path.name.rpartition(".")[0]
        newest = max(_numbers(directory, prefix), default=0)
        own = int(self._path.name.rpartition(".")[2])
        if self._released.is_set():
            raise FolderInUseError(f"{self._given} was released by this run, which is ending")
        if not newest:
            # A user emptied or removed the folder, so no other run uses it.
            directory.mkdir(parents=True, exist_ok=True)
            _create(self._path, self._record)
        elif newest != own or OwnerRecord.read(self._path) != self._record:
            other = _describe(OwnerRecord.read(directory / f"{prefix}.{newest:08d}"))
            raise FolderInUseError(
                f"{self._given} was taken over by {other}, because this run did not renew its lock there; stop one of "
                f"the two, or use a different {_flag(self._given)}"
            )

    def release(self) -> None:
        """Release the folder for other runs."""
        self._released.set()
        self._thread.join(_ENDING_S)  # a renewal after the removal would recreate the record
        if OwnerRecord.read(self._path) == self._record:
            self._path.unlink(missing_ok=True)

    def _renew(self, interval_s: float) -> None:
        while not self._released.wait(interval_s):
            with contextlib.suppress(OSError):  # `check` reports the problem
                if OwnerRecord.read(self._path) == self._record:
                    if isinstance(self._path, ObjectPath):
                        self._path.write_bytes(_encode(self._record))
                    else:
                        os.utime(self._path)


def own_folder(
    directory: Path,
    token: str,
    purpose: str,
    log: Callable[[str], None],
    prefix: str = FOLDER_RECORD,
    given: str = "",
    times: OwnerTimes = OwnerTimes(),
) -> RunLock:
    """Lock an existing folder, or with another ``prefix`` a file in it.

    ``given`` is the flag and its value in the command line, if it is not ``--save``.

    An owner on this node is dead if its process is gone; an owner on another node if its record has not been renewed
    for ``times.expired_after_s``. The wait may take that long, and a line announces it.

    Raises:
        FolderInUseError: it has an owner that is alive.
        OSError: the file system rejects the record.
    """
    record = OwnerRecord.of_this_process(token, purpose)
    given = given or f"--save {directory}"
    waiting = _Waiting(directory, given, times, log)
    while True:
        numbers = _numbers(directory, prefix)
        paths = {number: directory / f"{prefix}.{number:08d}" for number in numbers}
        if any(waiting.blocks(path) for path in paths.values()):
            time.sleep(_POLL_INTERVAL_S)
            continue
        own = directory / f"{prefix}.{max(numbers, default=0) + 1:08d}"
        try:
            _create(own, record)
        except FileExistsError:
            continue
        if OwnerRecord.read(own) != record:
            continue  # a store without atomic creation has let another process write it too
        if _numbers(directory, prefix) - set(numbers) == {int(own.name.rpartition(".")[2])}:
            for path in paths.values():
                path.unlink(missing_ok=True)
            return RunLock(own, record, given, times)
        # Another process added a record between the check and this record.
        own.unlink()
        time.sleep(random.uniform(0.0, _POLL_INTERVAL_S))


@dataclass(frozen=True)
class LockOwner:
    """Owner of a run lock, seen by a process that only reads; ``silent_s`` is the time since its last renewal.

    ``is_alive`` is whether its process runs. If the process is on another node, ``is_alive`` is whether it renewed its
    record within `OwnerTimes`. ``is_suspended`` is whether a signal or a debugger stopped the process.
    """

    record: OwnerRecord
    silent_s: float
    is_alive: bool
    is_suspended: bool


def read_owner(directory: Path, prefix: str = FOLDER_RECORD) -> LockOwner | None:
    """Read the owner of a folder, or the last owner if it did not release the folder.

    Return None if there is no record, or an incomplete one. Nothing is written, so the renewal is compared with the
    clock of this node.
    """
    path = directory / f"{prefix}.{max(_numbers(directory, prefix), default=0):08d}"
    record = OwnerRecord.read(path)
    if record is None:
        return None
    try:
        silent_s = max(time.time() - path.stat().st_mtime, 0.0)
    except OSError:  # the owner released the folder meanwhile
        return None
    is_alive = record.process.is_alive
    if is_alive is None:
        return LockOwner(record, silent_s, silent_s <= OwnerTimes().expired_after_s, is_suspended=False)
    state = state_of(ProcessName(**vars(record.process))) if is_alive else ""
    return LockOwner(record, silent_s, is_alive, state.startswith("stopped"))


class _Waiting:
    """Wait until every record in a folder is known to be dead, or one is known to be alive."""

    def __init__(self, directory: Path, given: str, times: OwnerTimes, log: Callable[[str], None]) -> None:
        self._directory = directory
        self._given = given
        self._times = times
        self._log = log
        self._since = time.monotonic()
        self._renewed: dict[Path, int] = {}
        self._clock_offset: float | None = None
        self._has_said = False

    def blocks(self, path: Path) -> bool:
        """Return whether a record may belong to a live owner, and must be checked again.

        Raises:
            FolderInUseError: its owner is alive.
        """
        try:
            renewed = path.stat().st_mtime_ns
        except FileNotFoundError:
            return False
        record = OwnerRecord.read(path)
        is_alive = None if record is None else record.process.is_alive
        if record is not None and (is_alive is False or record.is_of_this_process):
            return False
        age = max(self._now() - renewed / 1e9, 0.0)
        if record is not None and is_alive and not (record.is_ending and self._waited() < self._times.ending_s):
            raise self._in_use(record, age)
        if is_alive is None and self._renewed.setdefault(path, renewed) != renewed:
            raise self._in_use(record, age)
        if is_alive is None and age > self._times.expired_after_s:
            return False
        if not self._has_said and self._waited() > 2 * _POLL_INTERVAL_S:
            self._has_said = True
            self._log(
                f"waiting for {_describe(record)}, which owns {self._given}: it counts as ended if its process has "
                f"ended, or if it has not renewed its lock for {self._times.expired_after_s:.0f} s"
            )
        return True

    def _waited(self) -> float:
        return time.monotonic() - self._since

    def _in_use(self, record: OwnerRecord | None, age: float) -> FolderInUseError:
        return FolderInUseError(
            f"{self._given} is in use by {_describe(record)} (its record was renewed {age:.0f} s ago); wait for it to "
            f"end, stop it, or use a different {_flag(self._given)}"
        )

    def _now(self) -> float:
        """Return the time on the file system's clock, which may be another node's."""
        if self._clock_offset is None:
            probe = self._directory / f".clock.{os.getpid()}.{random.getrandbits(32):08x}"
            probe.touch()
            self._clock_offset = probe.stat().st_mtime - time.time()
            probe.unlink()
        return time.time() + self._clock_offset


def _flag(given: str) -> str:
    return given.partition(" ")[0]


def _describe(record: OwnerRecord | None) -> str:
    return "a run whose lock cannot be read" if record is None else record.describe()


def _numbers(directory: Path, prefix: str) -> set[int]:
    """Return the numbers of the records in a folder."""
    pattern = re.compile(re.escape(prefix) + r"\.(\d{8,})")
    try:
        found = [pattern.fullmatch(path.name) for path in directory.iterdir()]
    except FileNotFoundError:
        return set()
    return {int(match.group(1)) for match in found if match}


def _encode(record: OwnerRecord) -> bytes:
    return json.dumps(dataclasses.asdict(record)).encode()


def _create(path: Path, record: OwnerRecord) -> None:
    """Create a record that does not exist.

    Raises:
        FileExistsError: it exists.
    """
    text = _encode(record)
    if isinstance(path, ObjectPath):
        path.create(text)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        if os.write(descriptor, text) < len(text):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
