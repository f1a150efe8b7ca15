"""Find the folder and the format of the checkpoint that a command names."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from megatron.core.errors import CheckpointError
from megatron.interop.checkpoint_format import FORMAT_NAMES, CheckpointFormat, detect_format
from megatron.interop.new_iteration import TRACKER_FILE
from megatron.training.checkpointing.folder import (
    RELEASE,
    candidate_folders,
    complete_iterations,
    list_some,
    lost_tracker,
)


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
