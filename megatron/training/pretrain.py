"""Run a training from its configuration to its exit status: set up, resume, train, evaluate."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from megatron.core.datasets.gpt_dataset import SampleDataset
from megatron.core.dist_checkpointing.state_dict import RunTensors
from megatron.core.errors import ConfigurationError, InputError, MegatronError
from megatron.core.timers import Timers
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.core.tokenizers.tokenizer_record import record_tokenizer
from megatron.training.checkpointing import (
    CommonState,
    load_checkpoint,
    prepare_save_directory,
    save_checkpoint,
)
from megatron.training.config.argument_block import format_arguments
from megatron.training.config.run_config import RunConfig
from megatron.training.data_setup import BatchSource, Datasets, DatasetsProvider, build_datasets
from megatron.training.initialize import LaunchEnvironment, Runtime, initialize_runtime, shut_down
from megatron.training.metrics import MetricsWriter
from megatron.training.model_setup import ModelProvider, TrainingParts, build_training_parts
from megatron.training.reporting import format_datetime
from megatron.training.signals import ExitRequest
from megatron.training.train_state import TrainState
from megatron.training.training import TrainingRun, evaluate_and_report, train
from megatron.training.training_step import ForwardStep

Log = Callable[[str], None]


def pretrain(
    config: RunConfig,
    launch: LaunchEnvironment,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
) -> int:
    """Train as configured and return the exit status: 0 done, 2 wrong input, 1 failed.

    Errors that are the user's to mend are printed once, without a traceback.
    """
    start_time = time.time()
    log = _printer(launch)
    try:
        log(_describe_world(config))
        log(format_arguments(config))
        tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
        config = with_vocabulary(config, tokenizer, log)
        runtime = initialize_runtime(config, launch)
        _run(config, runtime, tokenizer, model_provider, datasets_provider, forward_step, start_time, log)
    except InputError as error:
        _report(error, launch)
        return 2
    except MegatronError as error:
        _report(error, launch)
        return 1
    except Exception:  # noqa: BLE001 the last thing that this process prints is what went wrong
        traceback.print_exc()
        return 1
    shut_down()
    return 0


def with_vocabulary(config: RunConfig, tokenizer: Tokenizer, log: Log) -> RunConfig:
    """Return the configuration with the tokenizer's vocabulary size, and say how far it is padded."""
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    padded = model.padded_vocab_size
    log(
        f" > padded vocab (size: {model.vocab_size}) with {padded - model.vocab_size} dummy tokens (new size: {padded})"
    )
    return dataclasses.replace(config, model=model)


def _run(
    config: RunConfig,
    runtime: Runtime,
    tokenizer: Tokenizer,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
    start_time: float,
    log: Log,
) -> None:
    timers = Timers(
        config.logging.timing_log_level,
        config.logging.timing_log_option,
        synchronize=runtime.device.synchronize,
    )
    if config.checkpoint.save is not None:
        prepare_save_directory(config.checkpoint.save, runtime.state, log)
    with timers("model-and-optimizer-setup", log_level=0):
        parts = build_training_parts(config, runtime, model_provider)
        train_state = _resume(config, runtime, parts, timers, log)
    with timers("train/valid/test-data-iterators-setup", log_level=0):
        datasets = build_datasets(config, runtime, tokenizer, datasets_provider)
    report = timers.report(runtime.state.world)
    if report:
        log(report)

    def source(dataset: SampleDataset | None, consumed_samples: int) -> BatchSource | None:
        if dataset is None:
            return None
        return BatchSource(dataset, config, runtime, tokenizer.vocab_size, consumed_samples)

    def save() -> None:
        if config.checkpoint.save is not None:
            _save(config, runtime, parts, train_state, tokenizer, log)

    metrics = None
    if runtime.is_reporter:
        metrics = MetricsWriter(config, runtime.device, train_state.iteration)
    run = TrainingRun(
        config=config,
        runtime=runtime,
        parts=parts,
        forward_step=forward_step,
        train_state=train_state,
        valid_source=source(datasets.valid, train_state.consumed_valid_samples) if _evaluates(config) else None,
        metrics=metrics,
        timers=timers,
        save=save,
    )
    try:
        stop_reason = None
        if _has_iterations_left(config, train_state):
            stop_reason = _train(run, datasets, start_time)
        if stop_reason is not None:
            log(stop_reason)
            return
        moment = f"iteration {train_state.iteration}"
        if config.validation.eval_iters > 0:
            evaluate_and_report(run, run.valid_source, "validation", moment)
            evaluate_and_report(run, source(datasets.test, 0), "test", moment)
    finally:
        if metrics is not None:
            metrics.close()


def _train(run: TrainingRun, datasets: Datasets, start_time: float) -> str | None:
    if datasets.train is None:
        raise ConfigurationError(
            "there is no training data: give the first number of --split a share, or --train-data-path"
        )
    train_source = BatchSource(
        datasets.train, run.config, run.runtime, run.config.model.vocab_size, run.train_state.consumed_train_samples
    )
    exit_request = ExitRequest(run.config.training, start_time)
    run.log(format_datetime("before the start of training step"))
    try:
        reason = train(run, train_source, exit_request)
    finally:
        exit_request.close()
    run.log(format_datetime("after training is done"))
    return reason


def _has_iterations_left(config: RunConfig, train_state: TrainState) -> bool:
    return not config.training.skip_train and train_state.iteration < config.train_iters


def _evaluates(config: RunConfig) -> bool:
    return config.validation.eval_iters > 0


def _resume(config: RunConfig, runtime: Runtime, parts: TrainingParts, timers: Timers, log: Log) -> TrainState:
    """Fill model, optimizer, schedule and random streams from the newest checkpoint; return where the run stands."""
    if config.checkpoint.load is None:
        return TrainState()
    tensors = RunTensors(models=[parts.module], optimizer=parts.optimizer, rng=runtime.rng.state_dict())
    with timers("load-checkpoint", log_level=0):
        loaded = load_checkpoint(
            config.checkpoint.load, tensors, runtime.state, config.checkpoint, config.to_dict(), log
        )
    if loaded is None:
        return TrainState()
    if not loaded.optimizer_loaded:
        parts.optimizer.reload_main_params()
    if loaded.rng is not None:
        runtime.rng.load_state_dict(dict(loaded.rng))
    if loaded.scheduler is not None:
        changes = parts.scheduler.load_state_dict(
            loaded.scheduler,
            override=config.scheduler.override_opt_param_scheduler,
            use_checkpoint=config.scheduler.use_checkpoint_opt_param_scheduler,
        )
        for change in changes:
            log(f"schedule changed since the checkpoint: {change}")
    return TrainState.from_progress(loaded.progress)


def _save(
    config: RunConfig,
    runtime: Runtime,
    parts: TrainingParts,
    train_state: TrainState,
    tokenizer: Tokenizer,
    log: Log,
) -> None:
    assert config.checkpoint.save is not None

    def write_tokenizer(folder: Path) -> None:
        record_tokenizer(tokenizer, folder.parent)

    save_checkpoint(
        config.checkpoint.save,
        RunTensors(models=[parts.module], optimizer=parts.optimizer, rng=runtime.rng.state_dict()),
        CommonState(
            progress=train_state.freeze(),
            config=config.to_dict(),
            scheduler=parts.scheduler.state_dict(),
            write_tokenizer=write_tokenizer,
        ),
        runtime.state,
        config.checkpoint,
        log,
    )


def _describe_world(config: RunConfig) -> str:
    model = config.model
    return (
        f"using world size: {config.world_size}, data-parallel size: {config.data_parallel_size}, "
        f"context-parallel size: {model.context_parallel_size}, "
        f"tensor-model-parallel size: {model.tensor_model_parallel_size}, "
        f"pipeline-model-parallel size: {model.pipeline_model_parallel_size}"
    )


def _printer(launch: LaunchEnvironment) -> Log:
    def log(text: str) -> None:
        if launch.rank == 0:
            print(text, flush=True)

    return log


def _report(error: MegatronError, launch: LaunchEnvironment) -> None:
    if launch.rank == 0:
        lines = error.problems if isinstance(error, ConfigurationError) else (str(error),)
        for line in lines:
            print(f"error: {line}", file=sys.stderr, flush=True)
