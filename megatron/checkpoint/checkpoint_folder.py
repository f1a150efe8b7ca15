"""Checkpoint folders: names, formats, tracker file, last good checkpoints, publication and retention.

A local save is published by renaming its folder. A save to an object store is published by its index, which is written
last. The objects of a save carry its tag, so that no save touches another save's objects. A marker object next to the
folders exists from the first to the last object of a save or removal, so that leftovers of an interrupted one are
recognized. Everything here runs on one rank without communication. Importing this module does not import torch.
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
    """Return whether a folder is one iteration's checkpoint in this format, complete or not."""
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
"""File name patterns and the format whose folders contain them; the first match determines the format."""
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
"""Names of loaders and savers, including Megatron-LM's, and the formats that they select."""


def detect_format(folder: str | Path) -> CheckpointFormat | None:
    """Return the format of a folder with the files of one checkpoint, or None if it has none."""
    folder = as_path(folder)
    for pattern, name in FORMAT_MARKS:
        if next(folder.glob(pattern), None) is not None:
            # torch.distributed.checkpoint writes both; only Megatron-LM's also has metadata.json.
            return "torch_dist" if name == "torchtitan" and (folder / BACKEND_FILE).exists() else name
    return None


def refuse_objects(folder: Path, found: CheckpointFormat | None) -> None:
    """Reject a folder of an object store in a format other than native.

    Raises:
        CheckpointError: the format is not native.
    """
    if isinstance(folder, ObjectPath) and found not in ("native", None):
        raise CheckpointError(
            f"{folder} is in {FORMAT_NAMES[found]}, but only {FORMAT_NAMES['native']} can be read from an object "
            "store; copy the folder to a file system first"
        )


TRACKER_FILE = "latest_checkpointed_iteration.txt"
Directory = TypeVar("Directory", bound=Path)


def iteration_folder(directory: Directory, iteration: int) -> Directory:
    return directory / f"iter_{iteration:07d}"


@contextmanager
def new_iteration(directory: Path, iteration: int | Literal["release"], needed: str) -> Iterator[Path]:
    """Create an iteration's folder, and point the tracker file at it after its content is on disk.

    ``needed`` is the size of the files in bytes, for messages.

    Raises:
        CheckpointError: writing to the file system failed, or the folder exists.
    """
    folder = directory / iteration if isinstance(iteration, str) else iteration_folder(directory, iteration)
    try:
        folder.mkdir(parents=True)
        try:
            yield folder
        except OSError:
            raise
        except BaseException:  # such as a configuration that the format cannot express
            shutil.rmtree(folder, ignore_errors=True)
            raise
        sync_folder(folder)
        write_text(directory / TRACKER_FILE, str(iteration))
        sync_folder(directory)
    except OSError as error:
        free = shutil.disk_usage(directory).free if directory.is_dir() else 0
        raise CheckpointError(
            f"cannot write {error.filename or folder}: {error.strerror}; {needed} bytes are needed in total, but "
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
    """Return the iteration in a folder's name, or None if it is not a checkpoint's name."""
    match = _ITERATION_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def saved_iterations(directory: Path) -> list[int]:
    """Return the iterations that have a folder, oldest first."""
    if isinstance(directory, ObjectPath):
        # In an object store a checkpoint exists only when its index does.
        folders = [entry for entry in directory.iterdir() if iteration_of_folder(entry) is not None]
        return sorted(int(entry.name.removeprefix("iter_")) for entry in folders if (entry / INDEX_FILE).is_file())
    if not os.path.isdir(directory):
        return []
    found = (iteration_of_folder(entry) for entry in directory.iterdir() if entry.is_dir())
    return sorted(iteration for iteration in found if iteration is not None)


def complete_iterations(directory: Path) -> list[int]:
    """Return the iterations whose folder contains a checkpoint, oldest first.

    A save publishes a folder only when it is complete. The integrity of its files is verified when it is loaded.
    """
    return [
        iteration
        for iteration in saved_iterations(directory)
        if detect_format(iteration_folder(directory, iteration)) is not None
    ]


def lost_tracker(directory: Path) -> str | None:
    """Describe the problem with a folder's tracker file; return None if it names a checkpoint.

    Raises:
        CheckpointError: the file exists but cannot be read.
    """
    path = directory / TRACKER_FILE
    try:
        text = _tracker_text(path)
    except FileNotFoundError:
        return f"{path} is missing"
    if text == RELEASE or names_iteration(text):
        return None
    return f"{path} contains {_shortened(text)}, which is neither an iteration nor {RELEASE!r}"


def candidate_folders(directory: Path, ckpt_step: int | None = None) -> list[Path]:
    """Return the requested checkpoint, followed by older ones to fall back to, newest first.

    The tracker file names the newest checkpoint. Without a tracker file the directory itself may be a checkpoint,
    including a Hugging Face folder with weights. With ``ckpt_step`` that iteration's folder is the only candidate. If
    the tracker file is missing, or holds neither a number nor ``release``, all complete checkpoints are candidates. The
    result is empty if there are none and no tracker file.

    Raises:
        CheckpointError: the iteration does not exist; or the tracker file cannot be read; or it is invalid and there
            are no checkpoints, or both a release and iterations.
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
            raise CheckpointError(f"{lost_tracker(directory)}, and its folder contains no checkpoint")
        return found
    newest = int(text)
    iterations = [iteration for iteration in saved_iterations(directory) if iteration < newest] + [newest]
    return [iteration_folder(directory, iteration) for iteration in reversed(iterations)]


def _without_tracker(directory: Path) -> list[Path]:
    """Return the checkpoints of a folder without a valid tracker file."""
    iterations = complete_iterations(directory)
    release = directory / RELEASE
    if detect_format(release) is None:
        return [iteration_folder(directory, iteration) for iteration in reversed(iterations)]
    if iterations:
        raise CheckpointError(
            f"{lost_tracker(directory)}, and its folder contains both {RELEASE} and iterations "
            f"({list_some(iterations)}); write {RELEASE!r} or an iteration to that file"
        )
    return [release]


def _tracker_text(path: Path) -> str:
    """Read the tracker file.

    Raises:
        FileNotFoundError: there is no tracker file.
        CheckpointError: it is not a file, or cannot be read.
    """
    try:
        with closing(open_ranged(path)) as file:
            return read_range(file, 0, _TRACKER_BYTES).decode("utf-8", errors="replace").strip()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError(path) from None
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}") from error


def names_iteration(text: str) -> bool:
    """Return whether the text of a tracker file is an iteration number of valid length."""
    return text.isascii() and text.isdigit() and len(text) <= _MOST_DIGITS


def _shortened(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:37] + "...")


def list_some(iterations: list[int]) -> str:
    """Return the newest iterations of a list as text."""
    return ", ".join(map(str, iterations[-8:])) + (" and older ones" if len(iterations) > 8 else "")


def weight_files(directory: Path) -> list[str]:
    """Return the names of files in a folder that look like weights in any format."""
    return sorted(path.name for pattern in _WEIGHTS for path in directory.glob(pattern))


def holds_tokenizer(directory: Path) -> bool:
    """Return whether a folder contains tokenizer files."""
    return any(next(directory.glob(pattern), None) is not None for pattern in _TOKENIZERS)


def _is_checkpoint(directory: Path) -> bool:
    if not (directory.is_dir() if isinstance(directory, ObjectPath) else os.path.isdir(directory)):
        return False
    found = detect_format(directory)
    return found is not None and (found != "hf" or bool(weight_files(directory)))


@dataclass(frozen=True)
class FoundCheckpoint:
    """Folder of one iteration or of a Hugging Face model, and its format."""

    folder: Path
    format: CheckpointFormat


def find_checkpoint(
    directory: Path, ckpt_step: int | None = None, expected: tuple[CheckpointFormat, ...] = tuple(FORMAT_NAMES)
) -> FoundCheckpoint:
    """Find the checkpoint that a folder's tracker file names, or that the folder itself is.

    ``ckpt_step`` selects another iteration.

    Raises:
        CheckpointError: there is no checkpoint, or it is not in one of the ``expected`` formats.
    """
    if not directory.is_dir():
        raise CheckpointError(f"{directory} is not a folder; pass a folder that contains a checkpoint")
    folder = directory
    if ckpt_step is None:
        lost = lost_tracker(directory)
        if lost is not None and ((directory / TRACKER_FILE).exists() or detect_format(directory) is None):
            _refuse_choice(directory, lost)
    if ckpt_step is not None or (directory / TRACKER_FILE).exists():
        # Only the newest: a command must not silently convert or compare another checkpoint.
        folder = candidate_folders(directory, ckpt_step)[0]
    if not folder.is_dir():
        raise CheckpointError(f"{directory / TRACKER_FILE} names {folder.name}, but there is no such folder next to it")
    found = detect_format(folder)
    if found is None:
        raise CheckpointError(
            f"{folder} contains no checkpoint: neither the file {TRACKER_FILE}, nor a file of the native format "
            "(index.json), of Megatron's formats torch (mp_rank_00) or torch_dist (common.pt), of torchtitan "
            "(.metadata) or of Hugging Face (config.json)"
        )
    if found not in expected:
        names = " or ".join(FORMAT_NAMES[name] for name in expected)
        raise CheckpointError(f"{folder} is in {FORMAT_NAMES[found]}, not in {names}; change --loader")
    return FoundCheckpoint(folder, found)


def _refuse_choice(directory: Path, lost: str) -> None:
    """Reject a folder with checkpoints of which the tracker file names none, and list the choices."""
    iterations = complete_iterations(directory)
    if iterations:
        raise CheckpointError(f"{lost}; select one of its iterations with --ckpt-step: {list_some(iterations)}")
    if detect_format(directory / RELEASE) is not None:
        raise CheckpointError(f"{lost}; pass {directory / RELEASE}, or write {RELEASE!r} to that file")


KNOWN_FILE = "known_to_train.json"


def is_known(directory: Path, iteration: int) -> bool:
    return (iteration_folder(directory, iteration) / KNOWN_FILE).is_file()


def newest_known(directory: Path, iterations: Collection[int] | None = None) -> int | None:
    """Return the newest iteration marked as validated, of all or of ``iterations``; None if there is none."""
    candidates = saved_iterations(directory) if iterations is None else iterations
    return max((iteration for iteration in candidates if is_known(directory, iteration)), default=None)


def mark_known(directory: Path, iteration: int, num_finite: int) -> None:
    """Mark a published checkpoint as validated, with a small file that is written atomically.

    Raises:
        OSError: writing to the file system failed.
    """
    folder = iteration_folder(directory, iteration)
    hidden = folder / f".{KNOWN_FILE}"
    text = json.dumps({"iteration": iteration, "finite_iterations_after": num_finite}) + "\n"
    replace_text(folder / KNOWN_FILE, hidden, text)


def point_tracker(directory: Path, iteration: int) -> None:
    """Point the tracker file at an older checkpoint after the run was rolled back to it.

    Raises:
        OSError: writing to the file system failed.
    """
    replace_text(directory / TRACKER_FILE, directory / f".{TRACKER_FILE}.rewound", str(iteration))


class ValidationWindow:
    """Count of finite iterations after each checkpoint of a run, including the one that it resumed from.

    A checkpoint is due to be marked after ``needed`` consecutive finite iterations.
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
        """Add a checkpoint to the waiting ones."""
        self._waiting.add(iteration)

    def observe(self, iteration: int, is_finite: bool) -> list[int]:
        """Record the end of an iteration, and return the checkpoints that are due now."""
        self._num_finite = self._num_finite + 1 if is_finite and iteration == self._iteration + 1 else int(is_finite)
        self._iteration = iteration
        if self._num_finite < self.needed:
            return []
        return sorted(saved for saved in self._waiting if saved <= iteration - self.needed)

    def settle(self, iteration: int) -> None:
        """Remove a checkpoint from the waiting ones."""
        self._waiting.discard(iteration)

    def go_back(self, iteration: int) -> None:
        """Discard the checkpoints after the iteration to which the run was rolled back."""
        self._waiting = {saved for saved in self._waiting if saved <= iteration}
        self._num_finite, self._iteration = 0, iteration


PENDING_TRACKER = f".{TRACKER_FILE}.pending"


def saving_folder(directory: Path, iteration: int, token: str = "") -> Path:
    """Return the hidden folder to which an iteration's checkpoint is written before it is published.

    The run's ``token`` separates its files from those of other runs.
    """
    return _hidden(directory, iteration, token, "saving")


def _hidden(directory: Path, iteration: int, token: str, state: str) -> Path:
    return directory / ".".join(("", iteration_folder(directory, iteration).name, *filter(None, (token,)), state))


def create_saving_folder(directory: Path, iteration: int, token: str = "") -> Path:
    """Create the empty hidden folder for a save, and the directory itself if necessary."""
    directory.mkdir(parents=True, exist_ok=True)
    folder = saving_folder(directory, iteration, token)
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir()
    return folder


def publish(directory: Path, iteration: int, token: str = "") -> None:
    """Rename the hidden folder of a finished save to its final name, then update the tracker file.

    The tracker's new text is written under a hidden name before the folder is renamed. A process killed between the two
    renames is thereby distinguished from a user who points the tracker at an older checkpoint.

    Raises:
        OSError: writing to the file system failed; the previously published checkpoint is unchanged.
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
    """Return the iterations that the retention rule removes after ``newest`` was saved.

    The ``kept`` iterations are not removed, nor are iterations after ``newest`` (of a run that was rolled back since).
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
    """Retention rule: keep the ``keep_last`` newest checkpoints (all, if None) and every ``keep_every``-th iteration.

    Iterations in ``kept`` are never removed and not counted. The oldest iteration in ``on_trial`` is kept too, since it
    may be the next to be validated.
    """

    keep_last: int | None = None
    keep_every: int | None = None
    kept: Collection[int] = ()
    on_trial: Collection[int] = ()

    def expired_of(self, directory: Path, newest: int) -> list[int]:
        """Return the iterations in a folder that are removed after ``newest`` was saved.

        The newest validated iteration is kept, as are folders in another format than ``newest``.
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
    """Remove the checkpoints that the retention rule removes, and return their iterations.

    A checkpoint of the same iteration that ``newest`` replaced is also removed. Each folder is first renamed to a
    hidden name, so that no partially removed checkpoint can be loaded.
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
    """Save to an object store: objects in the iteration's folder with the ``tag`` in their names, the index last."""

    directory: ObjectPath
    tag: str

    def folder(self, iteration: int) -> ObjectPath:
        return iteration_folder(self.directory, iteration)

    def create(self, iteration: int) -> None:
        """Create the marker object of a save."""
        self._mark(iteration, "saving").write_bytes(b"")

    def finish(self, iteration: int, index: CheckpointIndex) -> None:
        """Compare the sizes of the shards with the index, then write the index.

        If the folder has no index, it is written only if it still does not exist, so that only one of two concurrent
        runs succeeds. The index of an earlier save of the same iteration is replaced atomically.

        Raises:
            OSError: a shard is missing or has another size, or another run wrote the index first.
        """
        folder = self.folder(iteration)
        sizes = {entry.name: entry.num_bytes for entry in folder.store.entries(str(folder))}
        for name, file in index.files.items():
            if sizes.get(name) != file.num_bytes:
                reason = f"the store has {sizes.get(name) or 0} of its {file.num_bytes} bytes"
                raise OSError(errno.EIO, reason, str(folder / name))
        path, data = folder / INDEX_FILE, index_text(index).encode()
        if INDEX_FILE in sizes:
            path.write_bytes(data)
        else:
            path.create(data)

    def publish(self, iteration: int) -> None:
        """Point the tracker file at the checkpoint, and remove the objects that it replaced."""
        _remove_replaced(self.folder(iteration), self.tag)
        (self.directory / TRACKER_FILE).write_bytes(str(iteration).encode())
        self._mark(iteration, "saving").unlink()

    def give_up(self, iteration: int) -> None:
        """Remove the save's objects, unless its index exists already."""
        with contextlib.suppress(OSError):
            if not _is_published(self.folder(iteration), self.tag):
                _remove_unpublished(self.folder(iteration), self.tag)
                self._mark(iteration, "saving").unlink()

    def remove_expired(self, newest: int, retention: Retention) -> list[int]:
        """Remove expired checkpoints; removing the index first makes a checkpoint invisible."""
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
    """Complete or undo an interrupted save in a folder of an object store; log one line per action.

    If the checkpoint's index exists, the tracker file is updated; otherwise the save's objects are removed. Objects
    without a marker are not touched.
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
            log(f"removed the files that an interrupted save left in {folder}")
        mark.unlink()


def _enter(directory: ObjectPath, iteration: int, log: Callable[[str], None]) -> None:
    """Point the tracker file at an iteration, unless it names a later one."""
    tracker = directory / TRACKER_FILE
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    if not names_iteration(text) or int(text) < iteration:
        tracker.write_bytes(str(iteration).encode())
        log(f"wrote iteration {iteration}, which was saved completely before an interruption, to {tracker}")


def _is_published(folder: ObjectPath, tag: str) -> bool:
    """Return whether a folder's index belongs to the save with this tag."""
    try:
        text = (folder / INDEX_FILE).read_bytes()
    except FileNotFoundError:
        return False
    return f".{tag}.".encode() in text


def _remove_replaced(folder: ObjectPath, tag: str) -> None:
    """Remove the shards of earlier saves of an iteration, and the mark that their checkpoint is validated."""
    names = [path.name for path in folder.iterdir()]
    old = [name for name in names if name.startswith("shard_") and f".{tag}." not in name]
    for name in (*old, KNOWN_FILE) if old else ():
        (folder / name).unlink()


def _remove_unpublished(folder: ObjectPath, tag: str) -> None:
    """Remove the shards of a save, or the whole folder if the iteration has no published save."""
    if not (folder / INDEX_FILE).is_file():
        folder.remove_folder()
        return
    for path in folder.iterdir():
        if f".{tag}." in path.name:
            path.unlink()


class SavePlace(Protocol):
    """Destination of a save, which publishes a checkpoint atomically and removes expired ones."""

    @property
    def tag(self) -> str:
        """Return the tag in the names of this save's shards; empty if each save has its own folder."""

    def folder(self, iteration: int) -> Path:
        """Return the folder to which the files of an iteration are written."""
        ...

    def create(self, iteration: int) -> None:
        """Prepare for the files of an iteration."""

    def finish(self, iteration: int, index: CheckpointIndex) -> None:
        """Add the index after all files are written."""

    def publish(self, iteration: int) -> None:
        """Make the checkpoint the one that is loaded next.

        Raises:
            OSError: publishing failed; the previously published checkpoint is unchanged.
        """

    def give_up(self, iteration: int) -> None:
        """Remove the files of a failed save, ignoring errors."""

    def remove_expired(self, newest: int, retention: Retention) -> list[int]:
        """Remove the checkpoints that the retention rule removes; see `Retention.expired_of`."""
        ...


@dataclass(frozen=True)
class LocalPlace:
    """Save to a hidden folder of a file system, which is renamed."""

    directory: Path
    token: str

    @property
    def tag(self) -> str:
        """Return an empty tag, since each save has its own folder."""
        return ""

    def folder(self, iteration: int) -> Path:
        return saving_folder(self.directory, iteration, self.token)

    def create(self, iteration: int) -> None:
        """Create the hidden folder."""
        create_saving_folder(self.directory, iteration, self.token)

    def finish(self, iteration: int, index: CheckpointIndex) -> None:
        """Write the index to the hidden folder."""
        folder = self.folder(iteration)
        write_index(folder, index)
        sync_folder(folder)

    def publish(self, iteration: int) -> None:
        """Rename the folder, then point the tracker file at it."""
        publish(self.directory, iteration, self.token)

    def give_up(self, iteration: int) -> None:
        """Remove the hidden folder."""
        shutil.rmtree(self.folder(iteration), ignore_errors=True)

    def remove_expired(self, newest: int, retention: Retention) -> list[int]:
        """Rename expired folders to hidden names, and remove them."""
        return remove_expired(self.directory, newest, retention, self.token)


def place_of(directory: Path, token: str, number: int) -> SavePlace:
    """Return the destination of save ``number`` of the run with this ``token``."""
    if isinstance(directory, ObjectPath):
        return ObjectPlace(directory, f"{token}-{number}")
    return LocalPlace(directory, token)
