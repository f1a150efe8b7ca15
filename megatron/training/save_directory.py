"""Make sure, before anything is trained, that all ranks can save into the same folder."""

from __future__ import annotations

import secrets
from pathlib import Path

from megatron.core.collectives import broadcast_object
from megatron.core.dist_checkpointing.serialization import raise_on_all_ranks
from megatron.core.errors import CheckpointError
from megatron.core.parallel_state import ParallelState
from megatron.training.checkpoint_choice import Log
from megatron.training.checkpoint_directory import recover

_MARK_SUFFIX = ".shared"


def prepare_save_directory(directory: str | Path, state: ParallelState, log: Log) -> None:
    """Create the directory of a run and bring it in order after an interrupted save; call it before anything loads.

    Every rank writes its part of a checkpoint into the same folder: a directory that is not the same one for all
    ranks, on machines with a file system each, is refused here and not at the first save.

    Raises:
        CheckpointError: it cannot be created or written to, or a rank does not find in it what rank 0 put there. On
            every rank alike.
    """
    directory = Path(directory)
    mark = directory / broadcast_object(f".{secrets.token_hex(8)}{_MARK_SUFFIX}", state.world)
    error = None
    if state.world.is_first:
        try:
            directory.mkdir(parents=True, exist_ok=True)
            recover(directory, log)
            for left_over in directory.glob(f".*{_MARK_SUFFIX}"):
                left_over.unlink()
            mark.touch()
        except OSError as failure:
            error = CheckpointError(f"cannot prepare {directory}: {failure.strerror}; change --save")
    raise_on_all_ranks(error, state.world)
    if not mark.exists():
        error = CheckpointError(
            f"--save {directory} of rank {state.rank} is not the folder of rank 0; give --save a folder on a file "
            "system that all machines share, or leave it out"
        )
    try:
        raise_on_all_ranks(error, state.world)
    finally:
        if state.world.is_first:
            mark.unlink(missing_ok=True)
