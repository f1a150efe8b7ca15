"""Checkpoints in an object store, where nothing can be renamed: the index is put last, and is the checkpoint.

The objects of a save bear its tag, so that no save touches those of another. A mark beside the folders says that a save
or a removal is under way, from its first object to its last: what an interrupted one left is known by it.

Everything here runs on one rank; nothing communicates.
"""

from __future__ import annotations

import contextlib
import errno
import re
from collections.abc import Callable
from dataclasses import dataclass

from megatron.checkpoint.last_good import KNOWN_FILE
from megatron.core.dist_checkpointing.index import INDEX_FILE, CheckpointIndex, index_text
from megatron.core.object_store import ObjectPath
from megatron.interop.new_iteration import TRACKER_FILE, iteration_folder
from megatron.training.checkpointing.folder import names_iteration
from megatron.training.checkpointing.publication import Retention

_MARK = re.compile(r"\.(iter_\d{7,})\.([0-9a-f]*-\d+)\.(saving|removing)")


@dataclass(frozen=True)
class ObjectPlace:
    """Write into the iteration's own folder under names that bear the ``tag``, and put the index last."""

    directory: ObjectPath
    tag: str

    def folder(self, iteration: int) -> ObjectPath:
        """Return the folder of the iteration."""
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
