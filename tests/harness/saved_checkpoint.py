"""A checkpoint of a run, saved at once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from megatron.checkpoint.save import CommonState, SaveContext, SaveFolders, one_folder, save_in_steps
from megatron.config.run_config import CheckpointConfig
from megatron.core.dist_checkpointing.planner import CheckpointState, SavePlanner
from megatron.core.object_store import as_path
from megatron.core.parallel_state import ParallelState


def save_checkpoint(
    directory: str | Path,
    tensors: CheckpointState,
    common: CommonState,
    state: ParallelState,
    options: CheckpointConfig,
    log: Callable[[str], None],
    folders: SaveFolders | None = None,
) -> None:
    """Take all steps of a save, each when the task before it is done.

    Raises:
        CheckpointWriteError: the checkpoint could not be written, on every rank alike.
    """
    target = SaveContext(
        directory=as_path(directory),
        folders=one_folder(state) if folders is None else folders,
        state=state,
        options=options,
        log=log,
        planner=SavePlanner(state),
    )
    for _ in save_in_steps(tensors, common, target):
        pass
