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
from megatron.training.fault_tolerance.processes import ProcessIdentity, find_launcher, identify

FOLDER_RECORD = ".owner"
_POLL_INTERVAL_S = 0.2
_ENDING_S = 30.0


class FolderInUseError(ConfigurationError):
    """Report a folder or file that another run writes to."""


@dataclass(frozen=True)
class OwnerTimes:
    """Say how often a record is renewed, and when an owner that cannot be asked is taken to be gone.

    ``ending_s`` is how long an owner is waited for whose launcher is gone.
    """

    renewed_every_s: float = 15.0
    expired_after_s: float = 90.0
    ending_s: float = 20.0


@dataclass(frozen=True)
class OwnerRecord:
    """Hold what an owner writes down: who it is, the launcher that it will not outlive, and what it does there."""

    process: ProcessIdentity
    launcher: ProcessIdentity | None
    token: str
    purpose: str

    @classmethod
    def of_this_process(cls, token: str, purpose: str) -> OwnerRecord:
        """Return the record of this process."""
        launcher = find_launcher(elastic_run_id())
        return cls(identify(os.getpid()), None if launcher is None else identify(launcher), token, purpose)

    @classmethod
    def read(cls, path: Path) -> OwnerRecord | None:
        """Return what a file holds; None where that is no record, or not yet a whole one."""
        try:
            content = parse_json(read_plain_text(path))
            process, launcher = content["process"], content["launcher"]
            return cls(
                ProcessIdentity(**process),
                None if launcher is None else ProcessIdentity(**launcher),
                str(content["token"]),
                str(content["purpose"]),
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    @property
    def is_of_this_process(self) -> bool:
        """Return whether this very process wrote it, for an earlier run."""
        return self.process.is_alive is True and self.process.pid == os.getpid()

    @property
    def is_ending(self) -> bool:
        """Return whether the owner still runs and its launcher does not."""
        return self.process.is_alive is True and self.launcher is not None and self.launcher.is_alive is False

    def describe(self) -> str:
        """Return who that is, in words."""
        return f"{self.purpose} on {self.process.host}, process {self.process.pid}"


class RunLock:
    """Own a folder, or a file in it, from `own_folder` until `release`; a thread renews the record.

    Records are numbered. The newest one is the owner's: a number is taken by creating its file, which one process
    alone can do, and nobody takes a number while a record with a lower one may be alive.
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
        """See that the folder is still this owner's; to be called before anything in it appears or goes.

        Raises:
            FolderInUseError: another run took it over, which held this one for dead.
        """
        directory, prefix = self._path.parent, self._path.name.rpartition(".")[0]
        newest = max(_numbers(directory, prefix), default=0)
        own = int(self._path.name.rpartition(".")[2])
        if self._released.is_set():
            raise FolderInUseError(f"{self._given} was given up by this run, which is ending")
        if not newest:
            # The folder was emptied or removed by hand: nobody else is in it.
            directory.mkdir(parents=True, exist_ok=True)
            _create(self._path, self._record)
        elif newest != own or OwnerRecord.read(self._path) != self._record:
            other = _describe(OwnerRecord.read(directory / f"{prefix}.{newest:08d}"))
            raise FolderInUseError(
                f"{self._given} was taken over by {other}, while this run did not renew its record there; stop one of "
                f"the two, or give this one another {_flag(self._given)}"
            )

    def release(self) -> None:
        """Give the folder up, for whoever comes next."""
        self._released.set()
        self._thread.join(_ENDING_S)  # a record that is renewed after its removal would be there again
        if OwnerRecord.read(self._path) == self._record:
            self._path.unlink(missing_ok=True)

    def _renew(self, interval_s: float) -> None:
        while not self._released.wait(interval_s):
            with contextlib.suppress(OSError):  # `check` says what there is to say
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
    """Become the owner of an existing folder, or with another ``prefix`` of a file in it, or refuse.

    ``given`` is what the command line says of it, with the flag, where that is not ``--save``.

    An owner on this machine is gone when its process is; one on another machine when its record has not been renewed
    for ``times.expired_after_s``. So it may take as long to find out, and a line says so.

    Raises:
        FolderInUseError: it has an owner that is alive.
        OSError: the file system refuses the record.
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
            continue  # a store that looks first and writes then has let somebody else write it too
        if _numbers(directory, prefix) - set(numbers) == {int(own.name.rpartition(".")[2])}:
            for path in paths.values():
                path.unlink(missing_ok=True)
            return RunLock(own, record, given, times)
        # Somebody else came between the look and the record.
        own.unlink()
        time.sleep(random.uniform(0.0, _POLL_INTERVAL_S))


class _Waiting:
    """Look at the records in a folder until each is known to be dead or one to be alive."""

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
        """Return whether a record may be of a live owner; to be asked again then.

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
                f"waiting for {_describe(record)}, which owns {self._given}: it is taken to be gone when it has "
                f"ended, or has not renewed its record for {self._times.expired_after_s:.0f} s"
            )
        return True

    def _waited(self) -> float:
        return time.monotonic() - self._since

    def _in_use(self, record: OwnerRecord | None, age: float) -> FolderInUseError:
        return FolderInUseError(
            f"{self._given} is in use by {_describe(record)} (its record was renewed {age:.0f} s ago); wait for it to "
            f"end, stop it, or give another {_flag(self._given)}"
        )

    def _now(self) -> float:
        """Return the time by the clock of the file system, which may be another machine's."""
        if self._clock_offset is None:
            probe = self._directory / f".clock.{os.getpid()}.{random.getrandbits(32):08x}"
            probe.touch()
            self._clock_offset = probe.stat().st_mtime - time.time()
            probe.unlink()
        return time.time() + self._clock_offset


def _flag(given: str) -> str:
    return given.partition(" ")[0]


def _describe(record: OwnerRecord | None) -> str:
    return "a run whose record cannot be read" if record is None else record.describe()


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
    """Write a record that nobody else has written.

    Raises:
        FileExistsError: somebody has.
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
