"""The checkpoints of one run, saved one after the other, at once or while training goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from megatron.core.collectives import all_reduce
from megatron.core.dist_checkpointing.background_task import BackgroundTask
from megatron.core.dist_checkpointing.rank_share import CheckpointWriteError
from megatron.core.dist_checkpointing.staging import StagingArea
from megatron.core.dist_checkpointing.state_dict import RunTensors
from megatron.core.errors import CheckpointError, TrainingError
from megatron.training.checkpointing.checkpoint_choice import Log
from megatron.training.checkpointing.checkpoint_saving import CommonState, SaveTarget, save_in_steps
from megatron.training.checkpointing.save_directory import SaveFolders, prepare_save_directory
from megatron.training.config.checkpoint_config import NATIVE_FORMAT, CheckpointConfig
from megatron.training.process.initialize import Runtime


class CheckpointSaver:
    """Save into one directory, one checkpoint at a time; every method is called by all ranks together.

    With ``options.async_save`` a save returns when the tensors are copied. One thread of each rank then writes the
    copy, and `poll`, called between iterations, takes the next step of the save as soon as all ranks' threads are
    through; the next save, and `finish`, wait for it. The threads themselves never communicate.

    A checkpoint that the file system does not take is reported and given up: what was saved before is still in place,
    and training goes on.
    """

    def __init__(
        self, directory: Path, folders: SaveFolders, runtime: Runtime, options: CheckpointConfig, log: Log
    ) -> None:
        self._state = runtime.state
        self._device = runtime.device
        self._log = log
        self._is_async = options.async_save
        self._target = SaveTarget(
            directory=directory,
            folders=folders,
            state=runtime.state,
            options=options,
            log=log,
            area=StagingArea(runtime.device.synchronize) if options.async_save else None,
        )
        self._steps: Iterator[BackgroundTask[Any]] = iter(())
        self._task: BackgroundTask[Any] | None = None
        self._iteration = 0
        self._failure: CheckpointWriteError | None = None

    @property
    def is_saving(self) -> bool:
        """Return whether a save is under way."""
        return self._task is not None

    def save(self, tensors: RunTensors, common: CommonState) -> None:
        """Save a checkpoint, or begin to."""
        self.finish()
        self._steps = save_in_steps(tensors, common, self._target)
        self._iteration = common.progress.iteration
        self._failure = None
        self._advance()
        if not self._is_async:
            self.finish()

    def poll(self) -> None:
        """Take the next step of a save that is under way where all ranks are ready for it; never wait for the disk."""
        if self._task is None:
            return
        busy = torch.tensor([float(not self._task.is_done)], device=self._device.torch_device)
        all_reduce(busy, self._state.world)
        if not busy.item():
            self._advance()

    def finish(self) -> None:
        """Wait until no save is under way."""
        while self._task is not None:
            self._advance()

    def check_last(self) -> None:
        """Refuse to call a run done whose last checkpoint could not be written.

        Raises:
            TrainingError: the newest save failed, on every rank alike.
        """
        if self._failure is not None:
            raise TrainingError(f"the last checkpoint, of iteration {self._iteration}, was not saved: {self._failure}")

    def _advance(self) -> None:
        try:
            self._task = next(self._steps, None)
        except CheckpointWriteError as failure:
            self._task = None
            self._failure = failure
            self._log(
                f"WARNING: the checkpoint of iteration {self._iteration} was not saved: {failure}; what was saved "
                "before is still in place"
            )


def open_saver(options: CheckpointConfig, runtime: Runtime, log: Log) -> CheckpointSaver | None:
    """Bring the folder of ``--save`` in order and return what saves into it; None where it is not given.

    Raises:
        CheckpointError: the folder cannot be created or written to, or the format needs one folder for all ranks. On
            every rank alike.
    """
    if options.save is None:
        return None
    folders = prepare_save_directory(options.save, runtime.state, log)
    if options.ckpt_format != NATIVE_FORMAT and not folders.is_shared:
        # Their files belong together, or hold what ranks of several machines write.
        raise CheckpointError(
            f"--ckpt-format {options.ckpt_format} needs a folder that all machines share, and --save {options.save} is "
            "a folder of its own on each; change --save, or save in the native format and convert"
        )
    return CheckpointSaver(Path(options.save), folders, runtime, options, log)
