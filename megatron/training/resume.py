"""Resume a run from in-memory checkpoint copies or from its newest checkpoint."""

from __future__ import annotations

import dataclasses
import secrets
from dataclasses import dataclass
from typing import Any

import torch

from megatron.checkpoint import (
    FoundCopies,
    LocalCopies,
    TrainProgress,
    TrainState,
    candidate_folders,
    iteration_folder,
    iteration_of_folder,
    saved_iterations,
)
from megatron.config import RunConfig
from megatron.core.collectives import broadcast_object
from megatron.core.config_base import with_current_names
from megatron.core.dist_checkpointing import (
    INDEX_FILE,
    CheckpointState,
    float8_tensors,
    model_tensors,
    optimizer_tensors,
)
from megatron.core.errors import InputError
from megatron.core.models.gpt import GPTConfig
from megatron.core.object_store import ObjectPath, as_path
from megatron.training.callbacks import Callback, TrainingRun
from megatron.training.checkpointing import RunCheckpoints
from megatron.training.fault_tolerance import RendezvousMember
from megatron.training.initialize import LaunchEnvironment, Runtime

_MEASURED = ("cpu_gemm_backend", "tp_comm_overlap_impl")
"""Model fields that a run chooses by measuring, and then keeps."""


@dataclass(frozen=True, eq=False)
class ResumeState(Callback):
    """Resumes a run from the state of the previous generation, and copies its state for the next one.

    ``found`` are the in-memory copies to resume from, or None for a checkpoint or a fresh start. A run that
    ``began_from_save`` may remove earlier checkpoints of that folder.
    """

    member: RendezvousMember
    copies: LocalCopies | None
    found: FoundCopies | None
    interval: int
    began_from_save: bool

    def is_copied(self, iteration: int) -> bool:
        return self.copies is not None and iteration % self.interval == 0

    def resume(self, checkpoints: RunCheckpoints) -> TrainState:
        """Restore the run from the copies or a checkpoint, and return the training state."""
        state = self._resume(checkpoints)
        if checkpoints.saver is not None and not self.began_from_save:
            checkpoints.saver.protect(checkpoints_before(checkpoints.config.checkpoint.save, self.member.kept.started))
        return state

    def _resume(self, checkpoints: RunCheckpoints) -> TrainState:
        if self.found is None or self.copies is None:
            return checkpoints.resume()
        record, parts, runtime = self.found.record, checkpoints.parts, checkpoints.runtime
        tensors = checkpoints.tensors()
        with torch.no_grad():
            self.copies.load(self.found, _values(tensors, runtime))
        if tensors.float8 is not None:
            tensors.float8.loaded()
        parts.optimizer.load_scalar_state(dict(record["optimizer"]))
        runtime.rng.resume(tensors.rng, self.found.iteration)
        scheduler = checkpoints.config.scheduler
        parts.scheduler.load_state_dict(
            record["scheduler"],
            override=scheduler.override_opt_param_scheduler,
            use_checkpoint=scheduler.use_checkpoint_opt_param_scheduler,
        )
        checkpoints.go_on(record["model_record"], self.member.kept.counts.saved is not None)
        checkpoints.log(f"resuming from the copies in memory, at iteration {self.found.iteration}")
        return TrainState.from_progress(TrainProgress(**record["progress"]))

    def after_iteration(self, run: TrainingRun) -> None:
        if self.is_copied(run.train_state.iteration):
            run.callbacks.before_save(run)
        self.end_iteration(run.checkpoints, run.train_state)

    def end_iteration(self, checkpoints: RunCheckpoints, train_state: TrainState) -> None:
        """Record the end of an iteration, and copy the state if a copy is due; every rank must call this.

        Raises:
            CheckpointError: a node has no space for its copies. Every rank raises it.
        """
        self.member.end_iteration(checkpoints.published)
        if self.copies is None or not self.is_copied(train_state.iteration):
            return
        parts, model = checkpoints.parts, checkpoints.config.model
        record: dict[str, Any] = {
            "iteration": train_state.iteration,
            "progress": dataclasses.asdict(train_state.freeze()),
            "optimizer": parts.optimizer.scalar_state(),
            "scheduler": parts.scheduler.state_dict(),
            "model_record": checkpoints.model_record,
            "measured": {name: getattr(model, name) for name in _MEASURED},
        }
        with torch.no_grad():
            self.copies.save(_values(checkpoints.tensors(), checkpoints.runtime), record)

    def forget_copies(self) -> None:
        """Discard the existing copies after a rollback, so that no restart resumes from them."""
        if self.copies is not None:
            self.copies.forget()


def checkpoints_before(save: str | None, started: float) -> set[int]:
    """Return the iterations of a folder's checkpoints that are older than a run's start, in seconds since 1970.

    An object store has no folders. There, a checkpoint's time is that of its index, which is written last.
    """
    directory = as_path(save or "")
    name = INDEX_FILE if isinstance(directory, ObjectPath) else ""
    dated = {iteration: iteration_folder(directory, iteration) / name for iteration in saved_iterations(directory)}
    return {iteration for iteration, path in dated.items() if path.stat().st_mtime < started}


def find_continuation(
    config: RunConfig, runtime: Runtime, launch: LaunchEnvironment, member: RendezvousMember
) -> tuple[RunConfig, ResumeState]:
    """Return the configuration of a generation, and the state to resume from; collective."""
    options, given = config.restart, config
    began_from_save = config.checkpoint.load == config.checkpoint.save
    config = member.resumed(config, runtime)
    interval = options.non_persistent_save_interval
    if interval is None or member.kept.folder is None:
        return config, ResumeState(member, None, None, 1, began_from_save)
    jump = None
    if options.replication:
        is_one_machine = launch.local_world_size >= launch.world_size
        jump = options.replication_jump or (1 if is_one_machine else launch.local_world_size)
    token: str = broadcast_object(secrets.token_hex(8), runtime.state.world)
    copies = LocalCopies(member.kept.folder, runtime.state, runtime.device.torch_device, token, jump)
    found = copies.find()
    if found is not None and _is_older(found, config, given, runtime):
        found = None
    if found is not None:
        measured = with_current_names(GPTConfig, found.record["measured"])
        config = dataclasses.replace(config, model=dataclasses.replace(config.model, **measured))
    return config, ResumeState(member, copies, found, interval, began_from_save)


def _is_older(found: FoundCopies, config: RunConfig, given: RunConfig, runtime: Runtime) -> bool:
    """Return whether the run has a checkpoint newer than the copies; one that the run started from does not count."""
    checkpoint = config.checkpoint
    newest = None
    if runtime.is_reporter and checkpoint.load is not None and checkpoint.load == checkpoint.save:
        try:
            folders = candidate_folders(as_path(checkpoint.load), given.checkpoint.ckpt_step)
            newest = iteration_of_folder(folders[0]) if folders else None
        except InputError:
            newest = None  # loading the checkpoint reports what is wrong with it
    newest = broadcast_object(newest, runtime.state.world)
    return newest is not None and newest > found.iteration


def _values(tensors: CheckpointState, runtime: Runtime) -> list[torch.Tensor]:
    """Collect the tensors that a rank copies, in a fixed order: those that a checkpoint has of it."""
    described = model_tensors(tensors.models)
    if tensors.optimizer is not None:
        described += optimizer_tensors(tensors.optimizer)
    described += float8_tensors(tensors.float8, runtime.state)
    streams = [tensors.rng[name] for name in sorted(tensors.rng)]
    return [tensor.data for tensor in described] + streams
