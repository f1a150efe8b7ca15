"""The checkpoints of a folder: their names, the tracker file, and which one is to be loaded.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import re
from contextlib import closing
from pathlib import Path

from megatron.core.dist_checkpointing.index import INDEX_FILE
from megatron.core.errors import CheckpointError
from megatron.core.object_store import ObjectPath
from megatron.core.ranged_file import open_ranged, read_range
from megatron.interop.checkpoint_format import detect_format
from megatron.interop.new_iteration import TRACKER_FILE, iteration_folder

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
