"""The model, optimizer and progress in memory: built, rebuilt for other flags, loaded and saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch

from megatron.checkpoint import TrainState
from megatron.config import RunConfig
from megatron.core.console import Log, print_line
from megatron.core.dist_checkpointing import ShardedTensor, float8_tensors, model_tensors, optimizer_tensors
from megatron.core.optimizer import OptimizerParamScheduler
from megatron.core.tokenizers import Tokenizer
from megatron.training import (
    HeldModel,
    LaunchEnvironment,
    ModelAndOptimizer,
    RunCheckpoints,
    Runtime,
    build_model_and_optimizer,
    choose_implementations,
    elastic_run_id,
    initialize_lasting_runtime,
    open_saver,
    provide_model,
    read_launch_environment,
    schedule_of,
    with_vocabulary,
)
from megatron.training.fault_tolerance import die_with_launcher

_OF_A_TRAINING: Mapping[str, Any] = {
    "train_iters": 0,
    "train_samples": 0,
    "global_batch_size": 0,
    "rampup_batch_size": (),
    "step_batch_size_schedule": None,
    "batch_size_steps": (),
    "exit_interval": None,
    "exit_duration_in_mins": None,
    "exit_signal_handler": False,
    "exit_signal": "SIGTERM",
    "skip_train": False,
}
"""Fields of `TrainingConfig` that model and optimizer do not depend on, and a common value of each."""


def ignore_line(line: str) -> None:
    """Log nothing."""


def read_launch() -> LaunchEnvironment:
    """Return the launch environment; a process that torchrun started ends when torchrun does."""
    launch = read_launch_environment()
    if elastic_run_id():
        die_with_launcher(elastic_run_id(), launch.rank)
    return launch


def connect(config: RunConfig, launch: LaunchEnvironment, tokenizer: Tokenizer) -> tuple[RunConfig, Runtime]:
    """Create the process groups of a model, and choose what is selected by measuring; collective.

    The first model of a process also joins the group of all processes, unless the caller did. It is left when the
    process ends.
    """
    detail: Log = ignore_line if config.logging.brief_log or launch.rank else print_line
    config = with_vocabulary(config, tokenizer, detail)
    runtime = initialize_lasting_runtime(config, launch)
    return choose_implementations(config, runtime, launch, detail, detail), runtime


def _dependencies(config: RunConfig) -> tuple[Any, ...]:
    """Return the parts of the configuration on which model and optimizer depend, apart from the schedule."""
    training = dataclasses.replace(config.training, **_OF_A_TRAINING)
    optimizer = dataclasses.replace(config.optimizer, lr=0.0, min_lr=0.0)
    data = (config.data.seq_length, config.data.reset_attention_mask)
    return config.model, optimizer, config.ddp, training, data, config.world_size


def _tensors(parts: ModelAndOptimizer, runtime: Runtime) -> list[ShardedTensor]:
    for chunk in parts.ddp_chunks:
        chunk.finish_param_gather()
    return [
        *model_tensors(parts.chunks),
        *optimizer_tensors(parts.optimizer),
        *float8_tensors(parts.float8, runtime.state),
    ]


class ModelState:
    """Model and optimizer of this rank, for a configuration that may change from training to training."""

    def __init__(self, config: RunConfig, runtime: Runtime, tokenizer: Tokenizer) -> None:
        self.config = config
        self.runtime = runtime
        self.tokenizer = tokenizer
        self.held = HeldModel(self._build(config), TrainState())

    def log(self, line: str) -> None:
        """Print a line on the first rank."""
        if self.runtime.is_reporter:
            print_line(line)

    def adapt(self, config: RunConfig) -> None:
        """Continue with another configuration of the same model, with its schedule; collective.

        If model or optimizer depend on what has changed, they are built again, and their tensors are copied over host
        memory. The optimizer state restarts if it does not fit.
        """
        held, scheduler = self.held, self.held.parts.scheduler.state_dict()
        if _dependencies(config) != _dependencies(self.config):
            held.parts = self._rebuilt(config)
        parts = held.parts
        held.parts = dataclasses.replace(parts, scheduler=OptimizerParamScheduler(parts.optimizer, schedule_of(config)))
        held.parts.scheduler.load_state_dict(scheduler, override=True)
        self.config = config

    def load(self, config: RunConfig) -> None:
        """Fill the state from the checkpoint that the configuration names; collective.

        Raises:
            InputError: it cannot be loaded.
        """
        # The caller's flags decide about the schedule, as those of a later training do.
        scheduler = dataclasses.replace(config.scheduler, override_opt_param_scheduler=True)
        loading = dataclasses.replace(config, scheduler=scheduler)
        checkpoints = RunCheckpoints(loading, self.runtime, self.held.parts, self.tokenizer, None, ignore_line)
        self.held.train_state = checkpoints.resume()
        self.held.model_record = checkpoints.model_record

    def save(self, folder: str, **options: Any) -> None:
        """Save a checkpoint in the run's format; ``options`` are fields of `CheckpointConfig`; collective.

        Raises:
            MegatronError: it cannot be written.
        """
        chosen = dataclasses.replace(self.config.checkpoint, save=folder, async_save=False, load=None, **options)
        config = dataclasses.replace(self.config, checkpoint=chosen)
        saver = open_saver(chosen, self.runtime, self._warn)
        checkpoints = RunCheckpoints(config, self.runtime, self.held.parts, self.tokenizer, saver, self._warn)
        try:
            checkpoints.go_on(self.held.model_record, folder in self.held.saved_to)
            checkpoints.save(self.held.train_state)
            checkpoints.finish()
            checkpoints.check_last()
        finally:
            checkpoints.close()
        self.held.saved_to.add(folder)

    def _warn(self, line: str) -> None:
        if line.lstrip().startswith("WARNING"):
            self.log(line)

    def _build(self, config: RunConfig) -> ModelAndOptimizer:
        return build_model_and_optimizer(config, self.runtime, provide_model, self._log_of(config))

    def _log_of(self, config: RunConfig) -> Log:
        return self._warn if config.logging.brief_log else self.log

    @torch.no_grad()
    def _rebuilt(self, config: RunConfig) -> ModelAndOptimizer:
        old = self.held.parts
        kept = [(tensor.name, tensor.data.to("cpu", copy=True)) for tensor in _tensors(old, self.runtime)]
        scalars = old.optimizer.scalar_state()
        del old
        self.held.parts = None  # type: ignore[assignment]  # Its memory is free before the new one is allocated.
        parts = self._build(config)
        new = _tensors(parts, self.runtime)
        fits = [(tensor.name, tensor.data.shape) for tensor in new] == [(name, values.shape) for name, values in kept]
        if not fits:
            new, kept = new[: len(model_tensors(parts.chunks))], kept[: len(model_tensors(parts.chunks))]
        for tensor, (_, values) in zip(new, kept, strict=True):
            tensor.data.copy_(values)
        if parts.float8 is not None:
            parts.float8.loaded()
        if fits:
            parts.optimizer.load_scalar_state(scalars)
        else:
            parts.optimizer.reload_main_params()
            if scalars["num_steps"]:
                self.log("the optimizer state does not fit the new flags, and restarts")
        return parts
