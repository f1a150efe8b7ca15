"""Which checkpoint of a folder is loaded: all ranks agree on the newest one that is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from megatron.core.collectives import all_gather_objects, broadcast_object, run_on_all_ranks
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.parallel_state import ParallelState
from megatron.interop.new_iteration import TRACKER_FILE
from megatron.training.checkpointing.folder import candidate_folders, saved_iterations

Log = Callable[[str], None]
"""Prints a line, on rank 0 only."""
Result = TypeVar("Result")


def agree_on_candidates(directory: Path, ckpt_step: int | None, state: ParallelState) -> list[Path]:
    """Return the folders to try, newest first, as rank 0 sees them; none where there is no tracker file.

    Raises:
        CheckpointError: the iteration that is asked for is not there, or the tracker file is of no use.
    """
    seen = run_on_all_ranks(
        lambda: candidate_folders(directory, ckpt_step) if state.world.is_first else [], state.world
    )
    found: list[Path] = broadcast_object(seen, state.world)
    if not found:
        _refuse_where_others_have_some(directory, state)
    return found


def _refuse_where_others_have_some(directory: Path, state: ParallelState) -> None:
    trackers = all_gather_objects((directory / TRACKER_FILE).exists(), state.world)
    if any(trackers):
        raise CheckpointError(
            f"rank {trackers.index(True)} finds checkpoints in {directory} and rank 0, on another machine, none: bring "
            "back the folder of rank 0, or remove the others to begin anew"
        )


def agree_on_required_candidates(directory: Path, ckpt_step: int | None, state: ParallelState) -> list[Path]:
    """Return the folders to try as rank 0 sees them; at least one.

    Raises:
        CheckpointError: there is none. On every rank alike.
    """
    folders = agree_on_candidates(directory, ckpt_step, state)
    if not folders:
        raise CheckpointError(f"{directory} holds no checkpoint: there is no file {TRACKER_FILE} in it")
    return folders


def report_missing(directory: Path, exit_on_missing: bool, log: Log) -> None:
    """Warn that a run starts from random weights, or with ``exit_on_missing`` refuse to.

    Raises:
        CheckpointError: the run asked for a checkpoint or none at all.
    """
    if exit_on_missing:
        raise CheckpointError(
            f"{directory} holds no checkpoint (there is no file {TRACKER_FILE} in it) and "
            "--exit-on-missing-checkpoint is given; change --load"
        )
    log(f"WARNING: could not find the metadata file {directory / TRACKER_FILE}")
    log("    will not load any checkpoints and will start from random")
    iterations = saved_iterations(directory)
    if iterations:
        log(f"    (there are checkpoints in it: write {iterations[-1]} to that file to go on from the newest)")


def first_undamaged(folders: Sequence[Path], load: Callable[[Path], Result], log: Log) -> Result:
    """Return what ``load`` makes of the first folder that is not damaged; every rank takes the same one.

    Raises:
        CheckpointError: all are damaged.
    """
    for folder, older in zip(folders, [*folders[1:], None]):
        try:
            return load(folder)
        except DamagedCheckpointError as error:
            if len(folders) == 1:
                raise
            if older is None:
                raise CheckpointError(f"all {len(folders)} checkpoints are damaged; the oldest: {error}") from error
            log(f"WARNING: checkpoint {folder} is damaged ({_one_line(error)}); falling back to {older}")
    raise AssertionError("there is at least one candidate")


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines())
