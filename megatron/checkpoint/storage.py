"""Publish saves and remove expired ones, in a folder (by rename) or in an object store (the index comes last).

The objects of a save carry its tag, so that no save touches the objects of another. A marker object next to the
folders exists from the first to the last object of a save or a removal, so that leftovers of an interrupted one are
recognized. Everything here runs on one rank; nothing communicates.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from megatron.checkpoint.checkpoint_folder import (
    TRACKER_FILE,
    detect_format,
    iteration_folder,
    names_iteration,
    saved_iterations,
)
from megatron.checkpoint.last_good import KNOWN_FILE, newest_known
from megatron.core.dist_checkpointing.disk import sync_folder, write_text
from megatron.core.dist_checkpointing.index import INDEX_FILE, CheckpointIndex, index_text, write_index
from megatron.core.object_store import ObjectPath

PENDING_TRACKER = f".{TRACKER_FILE}.pending"


def saving_folder(directory: Path, iteration: int, token: str = "") -> Path:
    """Return the hidden folder that an iteration's checkpoint is written into before it is published.

    The ``token`` of a run keeps what it writes apart from what another one does.
    """
    return _hidden(directory, iteration, token, "saving")


def _hidden(directory: Path, iteration: int, token: str, state: str) -> Path:
    return directory / ".".join(("", iteration_folder(directory, iteration).name, *filter(None, (token,)), state))


def create_saving_folder(directory: Path, iteration: int, token: str = "") -> Path:
    """Create the empty hidden folder for a save, and the directory itself where it is not there yet."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = saving_folder(directory, iteration, token)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def publish(directory: Path, iteration: int, token: str = "") -> None:
    """Give the hidden folder of a run's finished save its name, then point the tracker file at it.

    The tracker's new text waits beside it under a hidden name before the folder is renamed, so that a process killed
    between the two renames is told apart from a user who points the tracker at an older checkpoint.

    Raises:
        OSError: the file system refused; what was published before is still in place.
    """
    final = iteration_folder(directory, iteration)
    pending = directory / PENDING_TRACKER
    replaced = _hidden(directory, iteration, token, "replaced")
    try:
        write_text(pending, str(iteration))
        if final.exists():
            os.rename(final, replaced)
        os.rename(saving_folder(directory, iteration, token), final)
    except OSError:
        if replaced.exists() and not final.exists():
            os.rename(replaced, final)
        pending.unlink(missing_ok=True)
        raise
    sync_folder(directory)
    os.rename(pending, directory / TRACKER_FILE)
    sync_folder(directory)


def expired_iterations(
    iterations: list[int],
    newest: int,
    keep_last: int | None,
    keep_every: int | None,
    kept: Collection[int | None] = (),
) -> list[int]:
    """Return which iterations the retention rule gives up after ``newest`` was saved.

    Those to be ``kept`` stay. Iterations beyond ``newest`` (of a run that was since rolled back) are left alone.
    """
    if keep_last is None:
        return []
    older = sorted(iteration for iteration in iterations if iteration <= newest)
    return [
        iteration
        for iteration in older[: max(len(older) - keep_last, 0)]
        if not (keep_every and iteration % keep_every == 0) and iteration not in (newest, *kept)
    ]


@dataclass(frozen=True)
class Retention:
    """Say which checkpoints of a run go: all but the ``keep_last`` newest, where it is given, and every ``keep_every``.

    Those of the iterations ``kept`` stay and do not count. The oldest one ``on_trial`` may become the next that is
    known to train, and stays too.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    kept: Collection[int] = ()
    on_trial: Collection[int] = ()

    def expired_of(self, directory: Path, newest: int) -> list[int]:
        """Return the iterations of the checkpoints in a folder that go after ``newest`` was saved.

        The newest one that is known to train stays, and so do folders in another format than the one of ``newest``.
        """
        folders = {iteration: iteration_folder(directory, iteration) for iteration in saved_iterations(directory)}
        found = {iteration: detect_format(folder) for iteration, folder in folders.items()}
        alike = [
            iteration
            for iteration, kind in found.items()
            if kind is not None and kind == found.get(newest) and iteration not in self.kept
        ]
        known = newest_known(directory, [iteration for iteration in alike if iteration <= newest])
        next_known = min((iteration for iteration in alike if iteration in self.on_trial), default=None)
        return expired_iterations(alike, newest, self.keep_last, self.keep_every, (known, next_known))


def remove_expired(directory: Path, newest: int, retention: Retention, token: str = "") -> list[int]:
    """Remove the checkpoints that the retention rule gives up, and return their iterations.

    A checkpoint of the same iteration that ``newest`` has replaced is removed too. Each is hidden by a rename first, so
    that no half-removed checkpoint can be loaded.
    """
    expired = retention.expired_of(directory, newest)
    hidden = [_hidden(directory, newest, token, "replaced")]
    for iteration in expired:
        hidden.append(_hidden(directory, iteration, token, "removing"))
        os.rename(iteration_folder(directory, iteration), hidden[-1])
    for folder in hidden:
        if folder.exists():
            shutil.rmtree(folder)
    return expired


_MARK = re.compile(r"\.(iter_\d{7,})\.([0-9a-f]*-\d+)\.(saving|removing)")


@dataclass(frozen=True)
class ObjectPlace:
    """Write into the iteration's own folder under names that bear the ``tag``, and put the index last."""

    directory: ObjectPath
    tag: str

    def folder(self, iteration: int) -> ObjectPath:
        return iteration_folder(self.directory, iteration)

    def create(self, iteration: int) -> None:
        """Leave the mark of a save."""
        self._mark(iteration, "saving").write_bytes(b"")

    def finish(self, iteration: int, index: CheckpointIndex) -> None:
        """Compare the sizes of the shards with the index, and put the index.

        Where the folder has none it is put on that condition, so that of two runs one has the checkpoint. The index of
        an earlier save of the same iteration is replaced in one step.

        Raises:
            OSError: a shard is not there as it was written, or another run was first.
        """
        folder = self.folder(iteration)
        sizes = {entry.name: entry.num_bytes for entry in folder.store.entries(str(folder))}
        for name, file in index.files.items():
            if sizes.get(name) != file.num_bytes:
                reason = f"the store has {sizes.get(name) or 0} of {file.num_bytes} bytes"
                raise OSError(errno.EIO, reason, str(folder / name))
        path, data = folder / INDEX_FILE, index_text(index).encode()
        if INDEX_FILE in sizes:
            path.write_bytes(data)
        else:
            path.create(data)

    def publish(self, iteration: int) -> None:
        """Let the tracker file name the checkpoint, and remove what it has replaced."""
        _remove_replaced(self.folder(iteration), self.tag)
        (self.directory / TRACKER_FILE).write_bytes(str(iteration).encode())
        self._mark(iteration, "saving").unlink()

    def give_up(self, iteration: int) -> None:
        """Remove the save's objects, unless its index is there already."""
        with contextlib.suppress(OSError):
            if not _is_published(self.folder(iteration), self.tag):
                _remove_unpublished(self.folder(iteration), self.tag)
                self._mark(iteration, "saving").unlink()

    def remove_expired(self, newest: int, retention: Retention) -> list[int]:
        """Remove the index of each checkpoint first, with which it is gone."""
        expired = retention.expired_of(self.directory, newest)
        for iteration in expired:
            mark = self._mark(iteration, "removing")
            mark.write_bytes(b"")
            (self.folder(iteration) / INDEX_FILE).unlink()
            self.folder(iteration).remove_folder()
            mark.unlink()
        return expired

    def _mark(self, iteration: int, state: str) -> ObjectPath:
        return self.directory / f".{iteration_folder(self.directory, iteration).name}.{self.tag}.{state}"


def recover_objects(directory: ObjectPath, log: Callable[[str], None]) -> None:
    """Complete or undo what an interrupted save left in a folder of objects; log what was done, one line each.

    A checkpoint whose index is there is entered in the tracker file; objects of a save without one are removed.
    Nothing without a mark is touched.
    """
    for mark in list(directory.iterdir()):
        match = _MARK.fullmatch(mark.name)
        if match is None:
            continue
        folder, tag = directory / match.group(1), match.group(2)
        if match.group(3) == "removing":
            if not (folder / INDEX_FILE).is_file():
                folder.remove_folder()
                log(f"removed {folder}, whose removal was interrupted")
        elif _is_published(folder, tag):
            _remove_replaced(folder, tag)
            _enter(directory, int(match.group(1).removeprefix("iter_")), log)
        else:
            _remove_unpublished(folder, tag)
            log(f"removed what an interrupted save left in {folder}")
        mark.unlink()


def _enter(directory: ObjectPath, iteration: int, log: Callable[[str], None]) -> None:
    """Let the tracker file name an iteration, unless it names a later one."""
    tracker = directory / TRACKER_FILE
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    if not names_iteration(text) or int(text) < iteration:
        tracker.write_bytes(str(iteration).encode())
        log(f"entered iteration {iteration}, saved completely before an interruption, in {tracker}")


def _is_published(folder: ObjectPath, tag: str) -> bool:
    """Return whether the index of a folder is that of the save with this tag."""
    try:
        text = (folder / INDEX_FILE).read_bytes()
    except FileNotFoundError:
        return False
    return f".{tag}.".encode() in text


def _remove_replaced(folder: ObjectPath, tag: str) -> None:
    """Remove the shards of earlier saves of an iteration, and the note that their checkpoint trains."""
    names = [path.name for path in folder.iterdir()]
    old = [name for name in names if name.startswith("shard_") and f".{tag}." not in name]
    for name in (*old, KNOWN_FILE) if old else ():
        (folder / name).unlink()


def _remove_unpublished(folder: ObjectPath, tag: str) -> None:
    """Remove the shards of a save; with the last save of an iteration everything else."""
    if not (folder / INDEX_FILE).is_file():
        folder.remove_folder()
        return
    for path in folder.iterdir():
        if f".{tag}." in path.name:
            path.unlink()


class SavePlace(Protocol):
    """Take the files of a save, make a checkpoint of them that is there as a whole or not at all, and remove others."""

    @property
    def tag(self) -> str:
        """Return what keeps the names of this save's shards apart from others'; nothing where a folder does."""

    def folder(self, iteration: int) -> Path:
        """Return where the files of an iteration are written."""
        ...

    def create(self, iteration: int) -> None:
        """Prepare for the files of an iteration."""

    def finish(self, iteration: int, index: CheckpointIndex) -> None:
        """Add the index to files that are all written."""

    def publish(self, iteration: int) -> None:
        """Make the checkpoint the one that is loaded next.

        Raises:
            OSError: what was published before is still in place.
        """

    def give_up(self, iteration: int) -> None:
        """Remove what there is of a save that failed; fail in silence."""

    def remove_expired(self, newest: int, retention: Retention) -> list[int]:
        """Remove what the retention rule gives up; see `Retention.expired_of`."""
        ...


@dataclass(frozen=True)
class LocalPlace:
    """Write into a hidden folder and rename it."""

    directory: Path
    token: str

    @property
    def tag(self) -> str:
        """Return nothing: each save has a folder of its own."""
        return ""

    def folder(self, iteration: int) -> Path:
        return saving_folder(self.directory, iteration, self.token)

    def create(self, iteration: int) -> None:
        """Make the hidden folder."""
        create_saving_folder(self.directory, iteration, self.token)

    def finish(self, iteration: int, index: CheckpointIndex) -> None:
        """Write the index into the hidden folder."""
        folder = self.folder(iteration)
        write_index(folder, index)
        sync_folder(folder)

    def publish(self, iteration: int) -> None:
        """Rename the folder, then let the tracker file name it."""
        publish(self.directory, iteration, self.token)

    def give_up(self, iteration: int) -> None:
        """Remove the hidden folder."""
        shutil.rmtree(self.folder(iteration), ignore_errors=True)

    def remove_expired(self, newest: int, retention: Retention) -> list[int]:
        """Hide folders by a rename and remove them."""
        return remove_expired(self.directory, newest, retention, self.token)


def place_of(directory: Path, token: str, number: int) -> SavePlace:
    """Return where the save of this ``number`` by the run that ``token`` names goes."""
    if isinstance(directory, ObjectPath):
        return ObjectPlace(directory, f"{token}-{number}")
    return LocalPlace(directory, token)
