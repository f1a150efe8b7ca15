"""Resume a run from its checkpoint and save it while it trains, synchronously or in the background."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from megatron.checkpoint import (
    CommonState,
    SaveContext,
    SaveFolders,
    TrainState,
    ValidationWindow,
    apply_retention,
    iteration_folder,
    load_checkpoint,
    mark_known,
    newest_known,
    point_tracker,
    prepare_save_directory,
    save_in_steps,
    saved_iterations,
)
from megatron.config import NATIVE_FORMAT, CheckpointConfig, RunConfig
from megatron.core.collectives import any_rank, broadcast_object, run_on_all_ranks
from megatron.core.config_base import config_from_dict
from megatron.core.console import Log
from megatron.core.dist_checkpointing import (
    BackgroundTask,
    CheckpointState,
    CheckpointWriteError,
    Progress,
    SavePlanner,
    StagingArea,
    ignore_progress,
)
from megatron.core.errors import CheckpointError, TrainingError
from megatron.core.object_store import as_path
from megatron.core.optimizer import ScheduleConfig, conflicting_fields, learning_rate
from megatron.core.tokenizers import Tokenizer, record_tokenizer
from megatron.training.initialize import Runtime
from megatron.training.loggers import describe_schedule_values
from megatron.training.model_setup import ModelAndOptimizer, schedule_of

_FLAGS: Mapping[str, str] = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "decoupled_max_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
    "init_lr": "--lr-warmup-init",
    "lr_decay_style": "--lr-decay-style",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "start_wd": "--start-weight-decay",
    "end_wd": "--end-weight-decay",
    "wd_incr_style": "--weight-decay-incr-style",
}
_LENGTHS: Mapping[str, str] = {
    "lr_warmup_steps": "--lr-warmup",
    "lr_decay_steps": "--lr-decay",
    "wsd_decay_steps": "--lr-wsd-decay",
    "wd_incr_steps": "--train",
}


@dataclass(frozen=True)
class _Conflict:
    """Flag whose value differs between the checkpoint and this run; ``can_be_given`` if the flag accepts ``stored``."""

    flag: str
    stored: str
    given: str
    can_be_given: bool = True

    def __str__(self) -> str:
        return f"{self.flag} {self.stored} → {self.given}"


def extends_decay(state: Mapping[str, Any], recorded: Mapping[str, Any], config: RunConfig) -> bool:
    """Return whether the schedule differs only because the run is longer and the decay covers the whole run.

    ``state`` is the scheduler's stored state and ``recorded`` the configuration of the checkpoint. Neither run was
    given a decay length, and no flag selects a schedule. The WSD schedule always has a given decay length.
    """
    flags, training, before = config.scheduler, config.training, recorded.get("training", {})
    if flags.override_opt_param_scheduler or flags.use_checkpoint_opt_param_scheduler or flags.lr_decay_style == "WSD":
        return False
    schedules = (recorded.get("scheduler", {}), vars(flags))
    if any(schedule.get(name) for schedule in schedules for name in ("lr_decay_iters", "lr_decay_samples")):
        return False
    length = _run_length(config)
    is_longer = 0 < (before.get(length) or 0) < getattr(training, length)
    if not is_longer or (length == "train_iters" and before.get("global_batch_size") != training.global_batch_size):
        return False
    stored, given = config_from_dict(ScheduleConfig, state["schedule"]), schedule_of(config)
    following = {"lr_decay_steps", "wd_incr_steps"}
    if flags.lr_warmup_fraction is not None and schedules[0].get("lr_warmup_fraction") == flags.lr_warmup_fraction:
        following.add("lr_warmup_steps")
    names = conflicting_fields(stored, given, int(state["num_samples"]))
    return bool(names) and following.issuperset(names)


def _run_length(config: RunConfig) -> str:
    return "train_samples" if config.training.train_samples else "train_iters"


def _describe_extension(state: Mapping[str, Any], recorded: Mapping[str, Any], config: RunConfig) -> str:
    """Format the line on a run that `extends_decay`."""
    name, num_samples = _run_length(config), int(state["num_samples"])
    flag, unit = f"--{name.replace('_', '-')}", name.removeprefix("train_")
    old, new = recorded["training"][name], getattr(config.training, name)
    stored, given = config_from_dict(ScheduleConfig, state["schedule"]), schedule_of(config)
    return (
        f"{flag} {old} → {new} extends the learning-rate decay to the new length, as with "
        f"--override-opt-param-scheduler: the learning rate continues at {learning_rate(given, num_samples):.6E}, not "
        f"{learning_rate(stored, num_samples):.6E}; --lr-decay-{unit} {old} keeps the old length"
    )


def check_schedule(state: Mapping[str, Any], recorded: Mapping[str, Any], config: RunConfig) -> None:
    """Reject a scheduler's stored ``state`` if the run has another schedule and no flag selects one of the two.

    ``recorded`` is the configuration of the checkpoint. A longer run is accepted if it `extends_decay`.

    Raises:
        CheckpointError: the schedules differ; the message names the flags that would give the stored schedule.
    """
    if config.scheduler.override_opt_param_scheduler or config.scheduler.use_checkpoint_opt_param_scheduler:
        return
    stored, given = config_from_dict(ScheduleConfig, state["schedule"]), schedule_of(config)
    names = conflicting_fields(stored, given, int(state["num_samples"]))
    if not names or extends_decay(state, recorded, config):
        return
    conflicts = list(dict.fromkeys(_conflicts(names, stored, given, config)))
    remedy = ""
    if all(conflict.can_be_given for conflict in conflicts):
        flags = " ".join(f"{conflict.flag} {conflict.stored}" for conflict in conflicts)
        remedy = f"{flags} to keep the recorded value{'s' if len(conflicts) > 1 else ''}, "
    raise CheckpointError(
        f"the schedule differs from the checkpoint's ({'; '.join(map(str, conflicts))}); pass {remedy}"
        "--override-opt-param-scheduler to use the new schedule, or --use-checkpoint-opt-param-scheduler to ignore "
        "this run's schedule flags and use the recorded schedule"
        f"{_earlier_checkpoint(stored, given, int(state['num_samples']), config)}"
    )


def _earlier_checkpoint(stored: ScheduleConfig, given: ScheduleConfig, num_samples: int, config: RunConfig) -> str:
    """Suggest checkpoints from which the given schedule can resume, if this one is already in the WSD decay phase.

    A decay that is in progress cannot restart later without a jump of the learning rate.
    """
    if stored.lr_decay_style != "WSD" or stored.wsd_decay_steps is None:
        return ""
    start = stored.lr_decay_steps - stored.wsd_decay_steps
    if num_samples <= start or conflicting_fields(stored, given, start):
        return ""
    by_samples = bool(config.training.train_samples)
    place = f"{start} samples" if by_samples else f"{start / config.training.global_batch_size:.10g} iterations"
    return (
        f"; its WSD decay began after {place}: an earlier checkpoint (--ckpt-step) resumes with the new decay as it is"
    )


def _conflicts(
    names: Sequence[str], stored: ScheduleConfig, given: ScheduleConfig, config: RunConfig
) -> Iterator[_Conflict]:
    fraction = config.scheduler.lr_warmup_fraction
    for name in names:
        old, new = getattr(stored, name), getattr(given, name)
        if name == "lr_warmup_steps" and fraction is not None:
            old_fraction = old / stored.lr_decay_steps if stored.lr_decay_steps else 0.0
            if not math.isclose(old_fraction, fraction):
                yield _Conflict("--lr-warmup-fraction", str(old_fraction), str(fraction))
        elif name in _LENGTHS:
            yield _length_conflict(_LENGTHS[name], old, new, config)
        elif name in ("start_wd", "end_wd") and given.wd_incr_style == stored.wd_incr_style == "constant":
            yield _Conflict("--weight-decay", str(old), str(new))
        else:
            yield _Conflict(_FLAGS[name], str(old), str(new))


def _length_conflict(flag: str, old: float | None, new: float | None, config: RunConfig) -> _Conflict:
    """Describe a length in iterations (or samples); it can be given as a flag only if it is a whole number of them."""
    batch, unit = config.training.global_batch_size, "iters"
    if config.training.train_samples:
        batch, unit = 1, "samples"
    # The length of the whole run is the user's choice.
    can_be_given = old is not None and old % batch == 0 and flag != "--train"
    stored, given = ("none" if value is None else f"{value / batch:.10g}" for value in (old, new))
    return _Conflict(f"{flag}-{unit}", stored, given, can_be_given)


class CheckpointSaver:
    """Checkpoint writer for one directory, with one save at a time; all ranks call every method together.

    With ``options.async_save``, a save returns when the tensors are copied. One thread per rank then writes the copy.
    `poll`, called between iterations, advances the save to its next step when the threads of all ranks are done. The
    next save and `finish` wait for it. The threads themselves never communicate.

    ``last_seconds`` is the duration of the newest complete save, and ``published`` is the iteration of the checkpoint
    that the run would resume from. Both are None before the first one.

    If the file system fails during a save, the failure is reported and the save is abandoned: earlier checkpoints are
    intact, and training continues. Checkpoints of earlier runs are never removed, unless the run resumes from them.
    """

    def __init__(
        self, directory: Path, folders: SaveFolders, runtime: Runtime, options: CheckpointConfig, log: Log
    ) -> None:
        self._state = runtime.state
        self._log = log
        self._is_async = options.async_save
        self._target = SaveContext(
            directory=directory,
            folders=folders,
            state=runtime.state,
            options=options,
            log=log,
            planner=SavePlanner(runtime.state),
            area=StagingArea(runtime.device.synchronize) if options.async_save else None,
            kept=frozenset(saved_iterations(directory)),
        )
        self._steps: Iterator[BackgroundTask[Any]] = iter(())
        self._task: BackgroundTask[Any] | None = None
        self._iteration = 0
        self._began = 0.0
        self.last_seconds: float | None = None
        self.published: int | None = None
        self._failure: CheckpointWriteError | None = None

    @property
    def is_saving(self) -> bool:
        return self._task is not None

    @property
    def has_failed(self) -> bool:
        return self._failure is not None

    def resume_from(self, folder: Path) -> None:
        """Treat the directory's checkpoints as this run's own if the checkpoint that it resumes from is there."""
        if folder.parent.resolve() == self._target.directory.resolve():
            self._target = replace(self._target, kept=frozenset())

    def protect(self, iterations: Set[int]) -> None:
        """Never remove the checkpoints of these iterations."""
        self._target = replace(self._target, kept=self._target.kept | iterations)

    def close(self) -> None:
        """Release the directory for other runs; call it when no save is in progress or its result is not needed."""
        self._target.folders.release()

    def wait_for_thread(self) -> None:
        """Wait until this rank's thread has finished writing, successfully or not."""
        if self._task is not None:
            self._task.wait()

    def save(self, tensors: CheckpointState, common: CommonState, on_trial: frozenset[int] = frozenset()) -> None:
        """Save a checkpoint, or start to; retention keeps the oldest of those ``on_trial``."""
        self.finish()
        self._began = time.monotonic()
        self._iteration = common.progress.iteration
        self._target = replace(
            self._target,
            kept=self._target.kept - {self._iteration},
            on_trial=on_trial,
            number=self._target.number + 1,
        )
        self._steps = save_in_steps(tensors, common, self._target)
        self._failure = None
        self._advance()
        if not self._is_async:
            self.finish()

    def poll(self) -> None:
        """Advance a save in progress to its next step if all ranks are ready for it; never wait for the disk."""
        if self._task is not None and not any_rank(not self._task.is_done, self._state.world):
            self._advance()

    def note_known(self, iteration: int, num_finite: int) -> bool:
        """Mark a checkpoint as validated and let retention remove older ones.

        Return False if the checkpoint may still be written (``options.async_save``), and True otherwise.
        """
        directory = self._target.directory
        if self._iteration == iteration and self.is_saving:
            return False
        if self._target.is_leader and iteration_folder(directory, iteration).is_dir():
            try:
                self._target.folders.check_owner()
                mark_known(directory, iteration, num_finite)
            except OSError as error:
                self._log(f"WARNING: could not mark iteration {iteration} as validated: {error.strerror}")
                return True
            if not self.is_saving and self._iteration:
                target = replace(self._target, on_trial=self._target.on_trial - {iteration})
                if warning := apply_retention(target, self._iteration):
                    self._log(warning)
        return True

    def go_back(self, iteration: int) -> None:
        """Point the directory's tracker file to an older checkpoint for a rollback.

        Raises:
            CheckpointError: the file system fails. Every rank raises it.
            FolderInUseError: another run took the directory over. Every rank raises it.
        """
        self.finish()
        run_on_all_ranks(lambda: self._point_tracker(iteration), self._state.world)
        self.published = iteration

    def finish(self) -> None:
        """Wait until no save is in progress."""
        while self._task is not None:
            self._advance()

    def check_last(self) -> None:
        """Fail if the run's last checkpoint could not be written.

        Raises:
            TrainingError: the newest save failed. Every rank raises it.
        """
        if self._failure is not None:
            raise TrainingError(f"the last checkpoint (iteration {self._iteration}) was not saved: {self._failure}")

    def _point_tracker(self, iteration: int) -> None:
        if self._target.is_leader:
            try:
                self._target.folders.check_owner()
                point_tracker(self._target.directory, iteration)
            except OSError as error:
                raise CheckpointError(
                    f"cannot roll back to iteration {iteration} in {self._target.directory}: {error.strerror}"
                ) from error

    def _advance(self) -> None:
        try:
            self._task = next(self._steps, None)
            if self._task is None:
                self.last_seconds = time.monotonic() - self._began
                self.published = self._iteration
        except CheckpointWriteError as failure:
            self._task = None
            self._failure = failure
            self._log(
                f"WARNING: the checkpoint of iteration {self._iteration} was not saved: {failure}; earlier checkpoints "
                "are unchanged"
            )


def open_saver(options: CheckpointConfig, runtime: Runtime, log: Log) -> CheckpointSaver | None:
    """Prepare the folder of ``--save`` and return its saver, or None without the flag.

    Raises:
        CheckpointError: the folder cannot be created or written to, or the format needs a folder shared by all ranks.
            Every rank raises it.
    """
    if options.save is None:
        return None
    folders = prepare_save_directory(options.save, runtime.state, log)
    if options.ckpt_format != NATIVE_FORMAT and not folders.is_shared:
        folders.release()
        # Files of these formats belong together, or contain data of ranks on several nodes.
        raise CheckpointError(
            f"--ckpt-format {options.ckpt_format} needs a folder that all nodes share, but --save {options.save} is "
            "a separate folder on each node; change --save, or save in the native format and convert"
        )
    return CheckpointSaver(as_path(options.save), folders, runtime, options, log)


@dataclass(eq=False)
class RunCheckpoints:
    """Save and resume a run according to ``--save`` and ``--load``; ``saver`` is None without ``--save``.

    A loaded checkpoint's record of its original Hugging Face folder is copied to the checkpoints of this run. ``told``
    is called with the progress of a load.
    """

    config: RunConfig
    runtime: Runtime
    parts: ModelAndOptimizer
    tokenizer: Tokenizer
    saver: CheckpointSaver | None
    log: Callable[[str], None]
    told: Progress = ignore_progress
    model_record: Mapping[str, Any] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        """Start to count the finite iterations after each checkpoint."""
        self._trial = ValidationWindow(self.config.faults.checkpoint_validation_steps)
        self._own: set[int] = set()

    def resume(self) -> TrainState:
        """Load the newest checkpoint of ``--load`` and return the training state.

        A run without ``--load``, or whose folder has no checkpoint yet, starts from the beginning.
        """
        options = self.config.checkpoint
        if options.load is not None:
            return self._load(options)
        return TrainState()

    def go_back(self) -> TrainState | None:
        """Roll back to the newest validated checkpoint of ``--save``; return None if there is none.

        The tracker file then names this checkpoint. Collective.
        """
        iteration = self.newest_known()
        if iteration is None or self.saver is None:
            return None
        self.saver.go_back(iteration)
        self._trial.go_back(iteration)
        self._own = {saved for saved in self._own if saved <= iteration}
        return self._load(self.config.checkpoint.resumed(iteration))

    def go_on(self, model_record: Mapping[str, Any] | None, has_saved: bool) -> None:
        """Continue a run that was not loaded here: set its Hugging Face record, and whether it ``has_saved`` itself."""
        self.model_record, options = model_record, self.config.checkpoint
        if options.save is not None and self.saver is not None and (has_saved or options.save == options.load):
            self.saver.resume_from(as_path(options.save) / "copies")

    def newest_known(self) -> int | None:
        """Return the newest validated checkpoint of ``--save``, as the first rank sees it; collective.

        Only those that this process has saved count, and the one that it resumed from.
        """
        options = self.config.checkpoint
        found = None
        if options.save is not None and self.runtime.is_reporter:
            # Other checkpoints may need data that this process does not have, or belong to another run.
            directory = as_path(options.save)
            found = newest_known(directory, self._own.intersection(saved_iterations(directory)))
        known: int | None = broadcast_object(found, self.runtime.state.world)
        return known

    def note_step(self, iteration: int, is_finite: bool) -> None:
        """Record the end of an iteration, and mark the checkpoints that it validates."""
        if self.saver is None:
            return
        for saved in self._trial.observe(iteration, is_finite):
            if self.saver.note_known(saved, self._trial.needed):
                self._trial.settle(saved)

    def _load(self, options: CheckpointConfig) -> TrainState:
        """Load the checkpoint of ``options.load``."""
        assert options.load is not None
        loaded = load_checkpoint(
            options.load,
            self.tensors(),
            self.runtime.state,
            options,
            self.config.to_dict(),
            self.log,
            self._check_schedule,
            self.told,
            is_brief=self.config.logging.brief_log,
        )
        if loaded is None:
            return TrainState()
        self.model_record = loaded.model_record
        if self.saver is not None and not loaded.is_fresh_start:
            self.saver.resume_from(loaded.folder)
        if not loaded.optimizer_loaded:
            self.parts.optimizer.reload_main_params()
            if loaded.is_fresh_start and not options.finetune:
                self.log(f"{loaded.folder} contains a model: training starts at iteration 0, with new optimizer state")
            elif not loaded.is_fresh_start:
                self.log(
                    f"--no-load-optim: training resumes at iteration {loaded.progress.iteration}, with new optimizer "
                    "state and the learning-rate schedule from its start"
                )
        if loaded.rng is not None:
            self.runtime.rng.resume(loaded.rng, loaded.progress.iteration)
        if loaded.scheduler is not None:
            is_extended = extends_decay(loaded.scheduler, loaded.config, self.config)
            changes = self.parts.scheduler.load_state_dict(
                loaded.scheduler,
                override=self.config.scheduler.override_opt_param_scheduler or is_extended,
                use_checkpoint=self.config.scheduler.use_checkpoint_opt_param_scheduler,
            )
            if is_extended:
                self.log(_describe_extension(loaded.scheduler, loaded.config, self.config))
            else:
                for change in changes:
                    self.log(f"schedule changed since the checkpoint: {change}")
        if (
            options.save is not None
            and not loaded.is_fresh_start
            and as_path(options.save) == as_path(options.load or "")
        ):
            self._trial.begin(loaded.progress.iteration)
            self._own.add(loaded.progress.iteration)
        return TrainState.from_progress(loaded.progress)

    def save(self, train_state: TrainState) -> bool:
        """Save a checkpoint, or start to with ``--async-save``; return False if it is already known to have failed."""
        if self.saver is None:
            return False
        common = CommonState(
            progress=train_state.freeze(),
            config=self.config.to_dict(),
            scheduler=self.parts.scheduler.state_dict(),
            model_record=self.model_record,
            write_tokenizer=self._write_tokenizer,
        )
        self._trial.begin(train_state.iteration)
        self.saver.save(self.tensors(), common, self._trial.waiting)
        if self.saver.has_failed:
            return False
        self._own.add(train_state.iteration)
        return True

    def poll(self) -> None:
        """Advance a save in progress without waiting for it; call this between iterations."""
        if self.saver is not None:
            self.saver.poll()

    def finish(self) -> None:
        """Wait until the last save is complete or abandoned."""
        if self.saver is not None:
            self.saver.finish()

    @property
    def last_seconds(self) -> float | None:
        """Return the duration of the newest complete save until its publication, or None before the first one."""
        return None if self.saver is None else self.saver.last_seconds

    @property
    def published(self) -> int | None:
        """Return the iteration of the checkpoint that the run would resume from, or None before it has saved one."""
        return None if self.saver is None else self.saver.published

    def check_last(self) -> None:
        """Fail if the run's last checkpoint could not be written.

        Raises:
            TrainingError: the newest save failed. Every rank raises it.
        """
        if self.saver is not None:
            self.saver.check_last()

    def close(self) -> None:
        """Release the folder of ``--save`` for other runs."""
        if self.saver is not None:
            self.saver.close()

    def _check_schedule(self, state: Mapping[str, Any], recorded: Mapping[str, Any]) -> None:
        check_schedule(state, recorded, self.config)
        is_extended = extends_decay(state, recorded, self.config)
        if not self.config.logging.brief_log:
            self.log(describe_schedule_values(state, self.config, is_extended))

    def tensors(self) -> CheckpointState:
        """Collect the tensors of a checkpoint of the current state."""
        for chunk in self.parts.ddp_chunks:
            chunk.finish_param_gather()
        return CheckpointState(
            models=self.parts.chunks,
            optimizer=self.parts.optimizer,
            rng=self.runtime.rng.state_dict(),
            float8=self.parts.float8,
        )

    def _write_tokenizer(self, folder: Path) -> None:
        # `record_tokenizer` creates the folder of this name itself.
        record_tokenizer(self.tokenizer, folder.parent)
