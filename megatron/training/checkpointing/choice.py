"""Which checkpoint of a folder is loaded: all ranks agree on the newest one that is whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from megatron.config.training_config import CheckpointConfig
from megatron.core.collectives import all_gather_objects, any_rank, broadcast_object, run_on_all_ranks
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.object_store import as_path
from megatron.core.parallel_state import ParallelState
from megatron.interop.new_iteration import TRACKER_FILE, iteration_folder
from megatron.training.checkpointing.folder import (
    candidate_folders,
    complete_iterations,
    holds_tokenizer,
    list_some,
    lost_tracker,
    saved_iterations,
    weight_files,
)

Log = Callable[[str], None]
"""Prints a line, on rank 0 only."""
Result = TypeVar("Result")


def agree_on_candidates(directory: Path, ckpt_step: int | None, state: ParallelState, log: Log) -> list[Path]:
    """Return the folders to try, newest first, as rank 0 sees them; none where there is no checkpoint.

    A tracker file that does not name them is said in a line.

    Raises:
        CheckpointError: the iteration that is asked for is not there, or the tracker file is of no use.
    """
    seen = run_on_all_ranks(
        lambda: candidate_folders(directory, ckpt_step) if state.world.is_first else [], state.world
    )
    found: list[Path] = broadcast_object(seen, state.world)
    lost = lost_tracker(directory) if state.world.is_first and found and ckpt_step is None else None
    if lost is not None and found[0] != directory:
        log(f"WARNING: {lost}: taking the newest complete checkpoint beside it, {found[0].name}")
    if not found:
        _refuse_where_others_have_some(directory, state)
    return found


def _refuse_where_others_have_some(directory: Path, state: ParallelState) -> None:
    here = (directory / TRACKER_FILE).exists() or bool(complete_iterations(directory))
    if any_rank(here, state.world):
        trackers = all_gather_objects(here, state.world)
        raise CheckpointError(
            f"rank {trackers.index(True)} finds checkpoints in {directory} and rank 0, on another machine, none: bring "
            "back the folder of rank 0, or remove the others to begin anew"
        )


def agree_on_required_candidates(directory: Path, ckpt_step: int | None, state: ParallelState, log: Log) -> list[Path]:
    """Return the folders to try as rank 0 sees them; at least one.

    Raises:
        CheckpointError: there is none. On every rank alike.
    """
    folders = agree_on_candidates(directory, ckpt_step, state, log)
    if not folders:
        raise CheckpointError(f"{directory} holds no checkpoint: there is no file {TRACKER_FILE} in it")
    return folders


def refuse_random_weights(directory: Path, options: CheckpointConfig, state: ParallelState) -> None:
    """Refuse to start from random weights where ``--load`` means others, as rank 0 sees the folder.

    Random ones are meant where a run will save to the same folder, or where the folder holds nothing but a tokenizer.

    Raises:
        CheckpointError: the run asked for a checkpoint or none at all. On every rank alike.
    """
    reason = _reason_against_random(directory, options) if state.world.is_first else None
    reason = broadcast_object(reason, state.world)
    if reason is not None:
        raise CheckpointError(f"--load {directory} {reason}")


def _reason_against_random(directory: Path, options: CheckpointConfig) -> str | None:
    exists = directory.exists()
    found = f"holds no checkpoint (there is no file {TRACKER_FILE} in it)" if exists else "does not exist"
    broken = [step for step in saved_iterations(directory) if any(iteration_folder(directory, step).iterdir())]
    if broken:
        return (
            f"{found}, but the folders of iterations ({list_some(broken)}) without a complete checkpoint; bring back "
            "what they lack, or remove them to begin a new run"
        )
    given = {
        "--exit-on-missing-checkpoint": options.exit_on_missing_checkpoint,
        "--finetune": options.finetune,
        "--use-checkpoint-args": options.use_checkpoint_args and not exists,
        "--no-load-optim": options.no_load_optim and not exists,
    }
    for name, is_given in given.items():
        if is_given:
            return f"{found}, and {name} is given; name the folder that a run saved to, or that holds a model"
    weights = weight_files(directory)
    if weights:
        named = ", ".join(weights[:4]) + (" ..." if len(weights) > 4 else "")
        return (
            f"holds weights that cannot be read ({named}): there is no {TRACKER_FILE} of a run and no config.json of a "
            "Hugging Face model beside them"
        )
    is_own = options.save is not None and as_path(options.save).resolve() == directory.resolve()
    if is_own or holds_tokenizer(directory):
        return None
    return f"{found}; name the folder that a run saved to, or that holds a model, or that of --save to begin a new run"


def warn_of_random_weights(directory: Path, log: Log) -> None:
    """Say that a run starts from random weights."""
    log(f"WARNING: could not find the metadata file {directory / TRACKER_FILE}")
    log("    will not load any checkpoints and will start from random")


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
