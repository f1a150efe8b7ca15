"""The checkpoints of a folder: their names, the tracker file, and which one is to be loaded.

Importing this module imports no torch.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from megatron.core.errors import CheckpointError
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
_ITERATION_FOLDER = re.compile(r"iter_(\d{7,})")


def iteration_of_folder(folder: Path) -> int | None:
    """Return the iteration that a folder's name gives, or None where it is not a checkpoint's."""
    match = _ITERATION_FOLDER.fullmatch(folder.name)
    return int(match.group(1)) if match else None


def saved_iterations(directory: Path) -> list[int]:
    """Return the iterations that have a folder, oldest first."""
    if not os.path.isdir(directory):
        return []
    found = (iteration_of_folder(entry) for entry in directory.iterdir() if entry.is_dir())
    return sorted(iteration for iteration in found if iteration is not None)


def candidate_folders(directory: Path, ckpt_step: int | None = None) -> list[Path]:
    """Return the checkpoint that is asked for and then the older ones to fall back to, newest first.

    The tracker file names the newest one. Where there is no tracker file, the directory may be a checkpoint itself, a
    Hugging Face folder with weights among them; else nothing is returned. With ``ckpt_step`` that iteration's folder is
    the only one. A tracker file that holds neither a number nor ``release`` is taken to be damaged, and all folders are
    candidates.
    """
    if ckpt_step is not None:
        folder = iteration_folder(directory, ckpt_step)
        if not folder.is_dir():
            there = ", ".join(map(str, saved_iterations(directory))) or "none"
            raise CheckpointError(f"there is no checkpoint {folder}; change --ckpt-step {ckpt_step} to one of: {there}")
        return [folder]
    try:
        text = (directory / TRACKER_FILE).read_text(encoding="utf-8", errors="replace").strip()
    except FileNotFoundError:
        return [directory] if _is_checkpoint(directory) else []
    except OSError as error:
        raise CheckpointError(f"cannot read {directory / TRACKER_FILE}: {error.strerror}") from error
    if text == RELEASE:
        return [directory / RELEASE]
    iterations = saved_iterations(directory)
    if text.isascii() and text.isdigit():
        newest = int(text)
        iterations = [iteration for iteration in iterations if iteration < newest] + [newest]
    elif not iterations:
        raise CheckpointError(
            f"{directory / TRACKER_FILE} holds {text!r}, which is neither an iteration nor {RELEASE!r}, and there "
            "is no checkpoint beside it"
        )
    return [iteration_folder(directory, iteration) for iteration in reversed(iterations)]


def weight_files(directory: Path) -> list[str]:
    """Return the names of what looks like weights, of whatever format, in a folder."""
    return sorted(path.name for pattern in _WEIGHTS for path in directory.glob(pattern))


def holds_tokenizer(directory: Path) -> bool:
    """Return whether there are files of a tokenizer in a folder."""
    return any(next(directory.glob(pattern), None) is not None for pattern in _TOKENIZERS)


def _is_checkpoint(directory: Path) -> bool:
    if not os.path.isdir(directory):
        return False
    found = detect_format(directory)
    return found is not None and (found != "hf" or bool(weight_files(directory)))
