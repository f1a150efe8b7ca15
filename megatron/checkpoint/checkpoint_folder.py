"""Checkpoint folders: their names, formats and tracker file, and which checkpoint of a folder is to be loaded.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from megatron.core.dist_checkpointing.disk import sync_folder, write_text
from megatron.core.dist_checkpointing.index import INDEX_FILE
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
