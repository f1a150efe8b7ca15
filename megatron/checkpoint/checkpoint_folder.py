"""Checkpoint folders: their names, formats and tracker file, last good checkpoints, publication and retention.

A save is published in a folder by a rename, in an object store by its index, which comes last. The objects of a save
carry its tag, so that no save touches the objects of another. A marker object next to the folders exists from the first
to the last object of a save or a removal, so that leftovers of an interrupted one are recognized. Everything here runs
on one rank; nothing communicates. Importing this module imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Collection, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol, TypeVar

from megatron.core.dist_checkpointing import (
    INDEX_FILE,
    CheckpointIndex,
    index_text,
    replace_text,
    sync_folder,
    write_index,
    write_text,
)
from megatron.core.errors import CheckpointError
from megatron.core.object_store import ObjectPath, as_path
from megatron.core.ranged_file import open_ranged, read_range

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
BACKEND_FILE = "metadata.json"


def is_torch_dist(folder: Path) -> bool:
    """Return whether a folder is an iteration's checkpoint in this format, whole or not."""
    return (folder / METADATA_FILE).is_file() or (folder / COMMON_FILE).is_file()


CheckpointFormat = Literal["native", "torch", "torch_dist", "torchtitan", "peft", "hf"]

FORMAT_MARKS: tuple[tuple[str, CheckpointFormat], ...] = (
    (INDEX_FILE, "native"),
    ("mp_rank_*", "torch"),
    (COMMON_FILE, "torch_dist"),
    (METADATA_FILE, "torchtitan"),
    ("adapter_config.json", "peft"),
    ("config.json", "hf"),
)
"""Names of files, as patterns, and the format whose folders have them; the first that is there decides."""
FORMAT_NAMES: dict[CheckpointFormat, str] = {
    "native": "the native format",
    "torch": "Megatron's torch format",
    "torch_dist": "Megatron's torch_dist format",
    "torchtitan": "torchtitan's format",
    "peft": "peft's format",
    "hf": "Hugging Face's format",
}
FORMATS = {
    "megatron": "megatron",
    "native": "native",
    "torch_dist": "torch_dist",
    "torch": "torch",
    "core": "torch",
    "mcore": "torch",
    "legacy": "torch",
    "hf": "hf",
    "torchtitan": "torchtitan",
    "llama_mistral": "hf",
    "peft": "peft",
}
"""Names of loaders and savers, Megatron's own among them, and what each stands for."""


def detect_format(folder: str | Path) -> CheckpointFormat | None:
    """Return the format of a folder that holds the files of one checkpoint, or None where there are none."""
    folder = as_path(folder)
    for pattern, name in FORMAT_MARKS:
        if next(folder.glob(pattern), None) is not None:
            # Both are written by torch.distributed.checkpoint; the one of Megatron has another file that says so.
            return "torch_dist" if name == "torchtitan" and (folder / BACKEND_FILE).exists() else name
    return None


def refuse_objects(folder: Path, found: CheckpointFormat | None) -> None:
    """Refuse a folder of an object store that is in another format than the native one.

    Raises:
        CheckpointError: it is.
    """
    if isinstance(folder, ObjectPath) and found not in ("native", None):
        raise CheckpointError(
            f"{folder} is in {FORMAT_NAMES[found]}, and only {FORMAT_NAMES['native']} is read from an object store; "
            "copy the folder to a file system first"
        )


TRACKER_FILE = "latest_checkpointed_iteration.txt"
Directory = TypeVar("Directory", bound=Path)


def iteration_folder(directory: Directory, iteration: int) -> Directory:
    return directory / f"iter_{iteration:07d}"


@contextmanager
def new_iteration(directory: Path, iteration: int | Literal["release"], needed: str) -> Iterator[Path]:
    """Make the folder of an iteration to write into; the tracker file names it when all of that is on disk.

    ``needed`` says how many bytes the files take.

    Raises:
        CheckpointError: the file system refuses, or the folder exists.
    """
    folder = directory / iteration if isinstance(iteration, str) else iteration_folder(directory, iteration)
    try:
        folder.mkdir(parents=True)
        yield folder
        sync_folder(folder)
        write_text(directory / TRACKER_FILE, str(iteration))
        sync_folder(directory)
    except OSError as error:
        free = shutil.disk_usage(directory).free if directory.is_dir() else 0
        raise CheckpointError(
            f"cannot write {error.filename or folder}: {error.strerror}; {needed} bytes are needed in all, "
            f"{free} are free"
        ) from error


RELEASE = "release"

_WEIGHTS = (
    "*.safetensors",
    "*.bin",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.gguf",
    "*.h5",
    "*.distcp",
    "mp_rank_*",
    "*.index.json",
)
_TOKENIZERS = ("tokenizer*", "*vocab*", "*.tiktoken", "*.model")
_TRACKER_BYTES = 4096
_MOST_DIGITS = 18
_ITERATION_FOLDER = re.compile(r"iter_(\d{7,})")


def iteration_of_folder(folder: Path) -> int | None:
    """Return the iteration that a folder's name gives, or None where it is not a checkpoint's."""
    match = _ITERATION_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def saved_iterations(directory: Path) -> list[int]:
    """Return the iterations that have a folder, oldest first."""
    if isinstance(directory, ObjectPath):
        # What has no index there is not there, or not yet.
        folders = [entry for entry in directory.iterdir() if iteration_of_folder(entry) is not None]
        return sorted(int(entry.name.removeprefix("iter_")) for entry in folders if (entry / INDEX_FILE).is_file())
    if not os.path.isdir(directory):
        return []
    found = (iteration_of_folder(entry) for entry in directory.iterdir() if entry.is_dir())
    return sorted(iteration for iteration in found if iteration is not None)


def complete_iterations(directory: Path) -> list[int]:
    """Return the iterations whose folder holds a checkpoint, oldest first.

    A save publishes a folder when it is complete; whether its files are whole is found out by loading it.
    """
    return [
        iteration
        for iteration in saved_iterations(directory)
        if detect_format(iteration_folder(directory, iteration)) is not None
    ]


def lost_tracker(directory: Path) -> str | None:
    """Return what is wrong with the tracker file of a folder; None where it names a checkpoint.

    Raises:
        CheckpointError: it is there and cannot be read.
    """
    path = directory / TRACKER_FILE
    try:
        text = _tracker_text(path)
    except FileNotFoundError:
        return f"{path} is missing"
    if text == RELEASE or names_iteration(text):
        return None
    return f"{path} holds {_shortened(text)}, which is neither an iteration nor {RELEASE!r}"


def candidate_folders(directory: Path, ckpt_step: int | None = None) -> list[Path]:
    """Return the checkpoint that is asked for and then the older ones to fall back to, newest first.

    The tracker file names the newest one. Where there is no tracker file, the directory may be a checkpoint itself, a
    Hugging Face folder with weights among them. With ``ckpt_step`` that iteration's folder is the only one. Where the
    tracker file is lost, or holds neither a number nor ``release``, all complete checkpoints are candidates; nothing is
    returned where there are none and no tracker file.

    Raises:
        CheckpointError: there is no such iteration; the tracker file cannot be read, or is of no use and there is
            nothing, or more than one kind of thing, to take in its place.
    """
    if ckpt_step is not None:
        folder = iteration_folder(directory, ckpt_step)
        if not folder.is_dir():
            there = ", ".join(map(str, saved_iterations(directory))) or "none"
            raise CheckpointError(f"there is no checkpoint {folder}; change --ckpt-step {ckpt_step} to one of: {there}")
        return [folder]
    try:
        text = _tracker_text(directory / TRACKER_FILE)
    except FileNotFoundError:
        return [directory] if _is_checkpoint(directory) else _without_tracker(directory)
    if text == RELEASE:
        return [directory / RELEASE]
    if not names_iteration(text):
        found = _without_tracker(directory)
        if not found:
            raise CheckpointError(f"{lost_tracker(directory)}, and there is no checkpoint beside it")
        return found
    newest = int(text)
    iterations = [iteration for iteration in saved_iterations(directory) if iteration < newest] + [newest]
    return [iteration_folder(directory, iteration) for iteration in reversed(iterations)]


def _without_tracker(directory: Path) -> list[Path]:
    """Return the checkpoints of a folder whose tracker file names none."""
    iterations = complete_iterations(directory)
    release = directory / RELEASE
    if detect_format(release) is None:
        return [iteration_folder(directory, iteration) for iteration in reversed(iterations)]
    if iterations:
        raise CheckpointError(
            f"{lost_tracker(directory)}, and beside it are both {RELEASE} and iterations ({list_some(iterations)}): "
            f"write {RELEASE!r} or the number of one to that file"
        )
    return [release]


def _tracker_text(path: Path) -> str:
    """Return what the tracker file holds.

    Raises:
        FileNotFoundError: there is none.
        CheckpointError: it is no file, or cannot be read.
    """
    try:
        with closing(open_ranged(path)) as file:
            return read_range(file, 0, _TRACKER_BYTES).decode("utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def names_iteration(text: str) -> bool:
    """Return whether the text of a tracker file is the number of an iteration, of no more digits than one can have."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def list_some(iterations: list[int]) -> str:
    """Return the newest iterations of a list in words."""
    return ", ".join(map(str, iterations[-8:])) + (" and older ones" if len(iterations) > 8 else "")


def weight_files(directory: Path) -> list[str]:
    """Return the names of what looks like weights, of whatever format, in a folder."""
    return sorted(path.name for pattern in _WEIGHTS for path in directory.glob(pattern))


def holds_tokenizer(directory: Path) -> bool:
    """Return whether there are files of a tokenizer in a folder."""
    return any(next(directory.glob(pattern), None) is not None for pattern in _TOKENIZERS)


def _is_checkpoint(directory: Path) -> bool:
    if not (directory.is_dir() if isinstance(directory, ObjectPath) else os.path.isdir(directory)):
        return False
    found = detect_format(directory)
    return found is not None and (found != "hf" or bool(weight_files(directory)))


@dataclass(frozen=True)
class FoundCheckpoint:
    """Name one checkpoint: the folder of an iteration, or of a Hugging Face model, and its format."""

    folder: Path
    format: CheckpointFormat


def find_checkpoint(
    directory: Path, ckpt_step: int | None = None, expected: tuple[CheckpointFormat, ...] = tuple(FORMAT_NAMES)
) -> FoundCheckpoint:
    """Find the checkpoint of a run's folder that its tracker file names, or that a folder is itself.

    ``ckpt_step`` asks for another iteration of a run's folder.

    Raises:
        CheckpointError: there is none, or it is not in one of the ``expected`` formats.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder; name one that holds a checkpoint")
    folder = directory
    if ckpt_step is None:
        lost = lost_tracker(directory)
        if lost is not None and ((directory / TRACKER_FILE).exists() or detect_format(directory) is None):
            _refuse_choice(directory, lost)
    if ckpt_step is not None or (directory / TRACKER_FILE).exists():
        # The newest only: what a command is told to convert or compare must not silently be another checkpoint.
        folder = candidate_folders(directory, ckpt_step)[0]
    if not folder.is_dir():
        raise CheckpointError(f"{directory / TRACKER_FILE} names {folder.name}, and there is no such folder beside it")
    found = detect_format(folder)
    if found is None:
        raise CheckpointError(
            f"{folder} holds no checkpoint: neither a file {TRACKER_FILE}, nor the files of the native format "
            "(index.json), of Megatron's torch format (mp_rank_00) or torch_dist (common.pt), of torchtitan's "
            "(.metadata), or of Hugging Face's (config.json)"
        )
    if found not in expected:
        names = " or ".join(FORMAT_NAMES[name] for name in expected)
        raise CheckpointError(f"{folder} is in {FORMAT_NAMES[found]}, not in {names}; change --loader")
    return FoundCheckpoint(folder, found)


def _refuse_choice(directory: Path, lost: str) -> None:
    """Refuse a folder that holds checkpoints of which the tracker file names none, and say how to name one."""
    iterations = complete_iterations(directory)
    if iterations:
        raise CheckpointError(f"{lost}; name one of its iterations with --ckpt-step: {list_some(iterations)}")
    if detect_format(directory / RELEASE) is not None:
        raise CheckpointError(f"{lost}; name {directory / RELEASE}, or write {RELEASE!r} to that file")


KNOWN_FILE = "known_to_train.json"


def is_known(directory: Path, iteration: int) -> bool:
    return (iteration_folder(directory, iteration) / KNOWN_FILE).is_file()


def newest_known(directory: Path, iterations: Collection[int] | None = None) -> int | None:
    """Return the newest checkpoint that is known to train, of all or of those given; None where there is none."""
    candidates = saved_iterations(directory) if iterations is None else iterations
    return max((iteration for iteration in candidates if is_known(directory, iteration)), default=None)


def mark_known(directory: Path, iteration: int, num_finite: int) -> None:
    """Mark a published checkpoint as known to train, by a small file in its folder that is complete or absent.

    Raises:
        OSError: the file system refuses.
    """
    folder = iteration_folder(directory, iteration)
    hidden = folder / f".{KNOWN_FILE}"
    text = json.dumps({"iteration": iteration, "finite_iterations_after": num_finite}) + "\n"
    replace_text(folder / KNOWN_FILE, hidden, text)


def point_tracker(directory: Path, iteration: int) -> None:
    """Let the tracker file name an older checkpoint, which a run has gone back to.

    Raises:
        OSError: the file system refuses.
    """
    replace_text(directory / TRACKER_FILE, directory / f".{TRACKER_FILE}.rewound", str(iteration))


class ValidationWindow:
    """Count the finite iterations after each checkpoint of a run, the one that it was resumed from included.

    A checkpoint is due to be marked when ``needed`` iterations in a row after it were finite.
    """

    def __init__(self, needed: int) -> None:
        self.needed = needed
        self._waiting: set[int] = set()
        self._num_finite = 0
        self._iteration = 0

    @property
    def waiting(self) -> frozenset[int]:
        return frozenset(self._waiting)

    def begin(self, iteration: int) -> None:
        """Wait for the iterations after a checkpoint."""
        self._waiting.add(iteration)

    def observe(self, iteration: int, is_finite: bool) -> list[int]:
        """Take note of an iteration that ended, and return the checkpoints that are due now."""
        self._num_finite = self._num_finite + 1 if is_finite and iteration == self._iteration + 1 else int(is_finite)
        self._iteration = iteration
        if self._num_finite < self.needed:
            return []
        return sorted(saved for saved in self._waiting if saved <= iteration - self.needed)

    def settle(self, iteration: int) -> None:
        """Wait no longer for a checkpoint."""
        self._waiting.discard(iteration)

    def go_back(self, iteration: int) -> None:
        """Forget the checkpoints after an iteration that the run has gone back to."""
        self._waiting = {saved for saved in self._waiting if saved <= iteration}
        self._num_finite, self._iteration = 0, iteration


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
