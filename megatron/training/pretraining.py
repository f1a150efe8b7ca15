"""Run a training from its configuration to its exit status: set up, resume, train, evaluate."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpoint import TrainState
from megatron.config import RunConfig
from megatron.core.available_host_memory import HostRoom, available_bytes
from megatron.core.console import Log, print_line, waiting
from megatron.core.datasets import (
    BlendedDatasetBuilder,
    DatasetSplits,
    ExternalSamples,
    ReadCounter,
    SampleDataset,
    SkippedSamples,
    blend_names,
    recorded_history,
)
from megatron.core.errors import ConfigurationError, InputError, MegatronError, TrainingError
from megatron.core.registry import registered_scripts
from megatron.core.timers import Timers
from megatron.core.tokenizers import Tokenizer
from megatron.training.autotune import choose_library, choose_num_threads, choose_tp_overlap
from megatron.training.batch_source import BatchSource, build_datasets, sample_order
from megatron.training.callbacks import (
    Callback,
    LiveLine,
    PartsClock,
    Profiling,
    ScheduleRecorder,
    Stragglers,
    TrainingRun,
    configured_callbacks,
    open_periodic_evaluations,
    open_progress,
)
from megatron.training.checkpointing import RunCheckpoints, open_saver
from megatron.training.data_plan import DatasetsProvider, sample_targets
from megatron.training.dist_signal_handler import ExitRequest
from megatron.training.evaluation import plan_evaluation
from megatron.training.exit_reason import reasons_of, refuse_in_run, report_failure
from megatron.training.fault_tolerance import (
    REPLACE,
    AnomalyDetector,
    KeptRank,
    RendezvousMember,
    Rewind,
    phase_marker,
    process_start_time,
    train_with_restarts,
    watching,
)
from megatron.training.initialize import (
    LaunchEnvironment,
    Runtime,
    has_run_failed,
    initialize_runtime,
    is_first_failure,
    shut_down,
)
from megatron.training.loggers import (
    LogInterval,
    RunRecord,
    check_packages,
    check_services,
    describe_batch_and_tokenizer,
    describe_buckets,
    describe_datasets,
    describe_initialized,
    describe_precision,
    describe_samples,
    format_datetime,
    format_evaluation,
    format_training_finished,
    log_arguments,
    open_metrics,
)
from megatron.training.model_setup import (
    ModelAndOptimizer,
    ModelProvider,
    build_model_and_optimizer,
    with_token_dispatcher,
    with_transformer_impl,
)
from megatron.training.preflight import check_host_memory
from megatron.training.resume import ResumeState, find_continuation
from megatron.training.training import evaluate_and_report, is_evaluation_due, save_finished, train
from megatron.training.training_step import ForwardStep


@dataclass(frozen=True, eq=False)
class Program:
    """Arguments of `pretrain_from_config` except the configuration."""

    launch: LaunchEnvironment
    tokenizer: Tokenizer
    model_provider: ModelProvider
    datasets_provider: DatasetsProvider
    forward_step: ForwardStep
    callbacks: Sequence[Callback]
    start_time: float
    is_brief: bool = False

    def log(self, text: str) -> None:
        """Print a line on the first rank."""
        if self.launch.rank == 0:
            print_line(text)

    def log_detail(self, text: str) -> None:
        """Print a line on the first rank, unless the log is brief."""
        if not self.is_brief:
            self.log(text)


@dataclass(eq=False)
class HeldModel:
    """Model, optimizer and progress that stay in memory between the trainings of one process.

    A training stops after ``last_iteration``. ``model_record`` is the record of the Hugging Face folder that the model
    came from. ``saved_to`` are the folders that earlier trainings saved to.
    """

    parts: ModelAndOptimizer
    train_state: TrainState
    last_iteration: int = 0
    model_record: Mapping[str, Any] | None = None
    saved_to: set[str] = field(default_factory=set)


@dataclass(frozen=True, eq=False)
class RunSetup:
    """Configuration, process groups and arguments of a run whose processes are connected.

    A run continues from ``held`` if it is not None, and otherwise builds a model and loads a checkpoint if there is
    one.
    """

    config: RunConfig
    runtime: Runtime
    program: Program
    continuation: ResumeState | None = None
    held: HeldModel | None = None

    def source(
        self,
        dataset: SampleDataset | ExternalSamples,
        consumed_samples: int,
        whole_set: int | None = None,
    ) -> BatchSource:
        """Open a data set from a position on, or with ``whole_set``, that many samples of it, each once."""
        vocab_size = self.program.tokenizer.vocab_size
        return BatchSource(dataset, self.config, self.runtime, vocab_size, consumed_samples, whole_set, evaluates=True)

    def training_source(
        self, dataset: SampleDataset | ExternalSamples, consumed_samples: int, shift: int = 0
    ) -> BatchSource:
        """Open the training data; its micro-batches record each sample's data set in a blend (see `BatchSource`)."""
        place = (self.config, self.runtime, self.program.tokenizer.vocab_size, consumed_samples)
        return BatchSource(dataset, *place, shift=shift, tells_data_sets=True)


def pretrain_from_config(
    config: RunConfig,
    launch: LaunchEnvironment,
    tokenizer: Tokenizer,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
    kept: KeptRank | None = None,
    callbacks: Sequence[Callback] = (),
) -> int:
    """Train as configured and return the exit status: 0 done, 2 wrong input, 1 failed.

    ``callbacks`` are the caller's own. Each hook of a run calls them in order, after the callbacks of the flags.
    `megatron.training.callbacks.callback.Callback` lists the hooks. Every rank must pass the same callbacks.

    The tokenizer and the data must have been checked (see `prepare_data_or_exit`). Errors that the user can fix are
    printed once, without a traceback. With ``--inprocess-restart`` the process is a worker of `keep_rank`, which has
    returned ``kept``. The exit status may then also be `REPLACE`, for the supervisor.
    """
    start_time = process_start_time() if kept is None else kept.started
    providers = (model_provider, datasets_provider, forward_step)
    program = Program(launch, tokenizer, *providers, callbacks, start_time, config.logging.brief_log)
    try:
        _check_offload(config, program)
    except ConfigurationError as error:
        return refuse_in_run(reasons_of(error), launch)
    if not config.restart.inprocess_restart:
        return _pretrain_once(config, program, None)
    try:
        return train_with_restarts(config, launch, kept, lambda member: _pretrain_once(config, program, member))
    except MegatronError as error:
        return refuse_in_run(reasons_of(error), launch, status=2 if isinstance(error, InputError) else 1)


def train_held(config: RunConfig, runtime: Runtime, program: Program, held: HeldModel) -> None:
    """Train a model that is in memory as configured, from its progress to the configured end; collective.

    ``held.train_state`` is the progress when this returns or raises, unless an exception interrupted a step.

    Raises:
        MegatronError: the input cannot be used, or the run failed.
    """
    _check_offload(config, program)
    check_packages(config)
    if program.launch.rank == 0:
        check_services(config)
    if not program.is_brief:
        log_arguments(config, program.log)
    # A process that runs alone may be stopped in a debugger, and blocks no other process.
    is_watched = config.world_size > 1 or config.initialization.hang_timeout_seconds is not None
    with _watching(config, runtime) if is_watched else nullcontext():
        _run(RunSetup(config, runtime, program, held=held))


def _pretrain_once(config: RunConfig, program: Program, member: RendezvousMember | None) -> int:
    """Train in one set of process groups; with a ``member``, errors that the user cannot fix are raised."""
    try:
        config = _describe(config, program)
        runtime = _connect(config, program, member)
        with _watching(config, runtime):
            _run(_prepare(config, runtime, program, member))
    except MegatronError as error:
        if member is not None and member.links.are_given_up:
            raise  # The error comes from values that were read after communication was aborted.
        return refuse_in_run(reasons_of(error), program.launch, status=2 if isinstance(error, InputError) else 1)
    except Exception as error:
        if member is not None:
            raise
        if is_first_failure():
            report_failure(error, program.launch)
        return 1
    shut_down()
    return 0


def _check_offload(config: RunConfig, program: Program) -> None:
    """Reject an offload that needs more host memory than is free; this needs no process group."""
    available = available_bytes()
    room = None if available is None else HostRoom(available, program.launch.local_world_size)
    model = dataclasses.replace(config.model, vocab_size=program.tokenizer.vocab_size)
    check_host_memory(dataclasses.replace(config, model=model), room)


def _describe(config: RunConfig, program: Program) -> RunConfig:
    """Check the loggers' packages and services, print the configuration, and return it with the vocabulary size."""
    check_packages(config)
    if program.launch.rank == 0:
        check_services(config)
    program.log_detail(f"{_describe_world(config)}\n{describe_precision(config)}")
    log_arguments(config, program.log)
    program.log_detail(describe_batch_and_tokenizer(config))
    return with_vocabulary(config, program.tokenizer, program.log_detail)


def _describe_world(config: RunConfig) -> str:
    return f"using world size: {config.world_size}, {config.parallel_sizes.describe()}"


def with_vocabulary(config: RunConfig, tokenizer: Tokenizer, log: Log) -> RunConfig:
    """Return the configuration with the tokenizer's vocabulary size, and log its padding."""
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    padded = model.padded_vocab_size
    num_dummies = padded - model.vocab_size
    log(f" > padded vocab (size: {model.vocab_size}) with {num_dummies} dummy tokens (new size: {padded})")
    return dataclasses.replace(config, model=model)


def _connect(config: RunConfig, program: Program, member: RendezvousMember | None) -> Runtime:
    """Initialize the process groups."""
    program.log_detail("> initializing torch distributed ...")
    is_first = program.launch.rank == 0
    with waiting("connecting the processes", is_on=is_first, prints=program.is_brief):
        runtime = initialize_runtime(config, program.launch, None if member is None else member.store)
    if member is not None:
        member.links.are_made(runtime.flight)
    return runtime


def _watching(config: RunConfig, runtime: Runtime) -> AbstractContextManager[None]:
    """Return a context in which a hang is reported and the run ended."""
    graphs = config.training.cuda_graph_impl != "none" or config.optimizer.optimizer_cuda_graph
    settling = 1 + (config.training.cuda_graph_warmup_steps if graphs else 0)
    seconds, folder = config.initialization.hang_timeout_seconds, config.checkpoint.local_save
    leave_with = REPLACE if config.restart.inprocess_restart else 1
    return watching(runtime.flight, runtime.state, runtime.device, seconds, folder, settling, leave_with)


def _prepare(config: RunConfig, runtime: Runtime, program: Program, member: RendezvousMember | None) -> RunSetup:
    """Find where a restarted run resumes, and choose the implementations that are selected by measuring."""
    continuation = None
    if member is not None:
        config, continuation = find_continuation(config, runtime, program.launch, member)
    config = choose_implementations(config, runtime, program.launch, program.log, program.log_detail)
    program.log_detail(describe_initialized(config, program.start_time))
    return RunSetup(config, runtime, program, continuation)


def choose_implementations(
    config: RunConfig, runtime: Runtime, launch: LaunchEnvironment, log: Log, log_detail: Log
) -> RunConfig:
    """Choose the number of CPU threads and the implementations that are selected by measuring; collective."""
    config = choose_num_threads(config, runtime, launch, log)
    config = choose_library(config, runtime, log_detail)
    config = choose_tp_overlap(config, runtime, log)
    config = with_transformer_impl(config, runtime, log)
    return with_token_dispatcher(config, runtime, log)


def _run(setup: RunSetup) -> None:
    """Set up, then train and evaluate; roll back to an older checkpoint whenever a policy requires it."""
    with (
        closing(Profiling(setup.config, setup.runtime, setup.program.log)) as profiling,
        ExitStack() as kept_open,
    ):
        run, datasets = _set_up(setup, profiling, kept_open)
        is_done = False
        try:
            while not is_done:
                with closing(run.evaluation_sets):
                    is_done = _train_and_evaluate(setup, run, datasets)
                if not is_done:
                    run = _go_back(setup, run, datasets)
                    if setup.held is not None:
                        setup.held.train_state = run.train_state
            run.checkpoints.check_last()
        except TrainingError:
            # Every rank gets here, so a checkpoint in progress can be finished.
            run.checkpoints.finish()
            raise
        finally:
            if setup.held is not None:
                run.record_data_read()  # a later training continues from it
            if run.metrics is not None:
                run.metrics.close()


def _set_up(setup: RunSetup, profiling: Profiling, kept_open: ExitStack) -> tuple[TrainingRun, DatasetSplits]:
    """Build the objects of a run, and restore them from its checkpoint."""
    config, runtime = setup.config, setup.runtime
    live = kept_open.enter_context(LiveLine(config, runtime.flight, runtime.is_reporter))
    clock = PartsClock(runtime.flight, runtime.device.torch_device) if config.logging.log_straggler else None
    timers = _make_timers(config, runtime, clock)
    parts = _build_model(setup, timers)
    checkpoints, train_state = _resume(setup, parts, timers, live, kept_open)
    datasets = _build_datasets(setup, train_state, timers, live)
    setup.program.log_detail(f"done with setup ...\n{timers.report(runtime.state)}")
    evaluation_sets = plan_evaluation(config, datasets, train_state, setup.source)
    counter = _read_counter(config, datasets)
    metrics = open_metrics(config, runtime, train_state.iteration, blend_names(datasets.train))
    progress = open_progress(config, runtime, train_state)
    guard, stragglers = None, None
    if datasets.train is not None:
        guard = _make_guard(setup, parts, checkpoints, datasets.train, train_state)
    if clock is not None:
        stragglers = Stragglers(clock, runtime.state, runtime.device.torch_device, train_state.iteration)
    last_iteration = config.train_iters if setup.held is None else setup.held.last_iteration
    recorder = ScheduleRecorder(config, runtime)
    callbacks = configured_callbacks(
        config,
        runtime,
        parts,
        profiling=profiling,
        recorder=recorder,
        live=live,
        stragglers=stragglers,
        guard=guard,
        progress=progress,
        evaluations=open_periodic_evaluations(config, runtime, parts, setup.program.tokenizer, live),
        continuation=setup.continuation,
        own=setup.program.callbacks,
    )
    run = TrainingRun(
        config=config,
        runtime=runtime,
        parts=parts,
        forward_step=setup.program.forward_step,
        train_state=train_state,
        evaluation_sets=evaluation_sets,
        counter=counter,
        metrics=metrics,
        timers=timers,
        checkpoints=checkpoints,
        callbacks=callbacks,
        step_timers=profiling.timers(timers),
        action_clock=recorder.action_clock(profiling.action_clock),
        log_interval=LogInterval(
            config.logging.log_interval, last_iteration - train_state.iteration, config.train_iters
        ),
        guard=guard,
        show_progress=live.show,
        last_iteration=last_iteration,
    )
    return run, datasets


def _make_timers(config: RunConfig, runtime: Runtime, clock: PartsClock | None) -> Timers:
    return Timers(
        config.logging.timing_log_level,
        config.logging.timing_log_option,
        synchronize=runtime.device.synchronize,
        note=phase_marker(runtime.flight, None if clock is None else clock.mark),
    )


def _build_model(setup: RunSetup, timers: Timers) -> ModelAndOptimizer:
    config, runtime, program = setup.config, setup.runtime, setup.program
    if setup.held is not None:
        return setup.held.parts
    program.log_detail(f"building {type(config.model).__name__.removesuffix('Config')} model ...")
    with timers("model-and-optimizer-setup"):
        parts = build_model_and_optimizer(config, runtime, program.model_provider, program.log)
    buckets = describe_buckets(parts.ddp_chunks, runtime.state, config.logging.log_megatron_lines)
    if buckets is not None and not program.is_brief:
        print_line(buckets)
    program.log_detail(f"> learning rate decay style: {config.scheduler.lr_decay_style}")
    return parts


def _resume(
    setup: RunSetup, parts: ModelAndOptimizer, timers: Timers, live: LiveLine, kept_open: ExitStack
) -> tuple[RunCheckpoints, TrainState]:
    """Open the checkpoint folders, load the state that the run resumes from, and record its start."""
    config, runtime, program = setup.config, setup.runtime, setup.program
    saver = open_saver(config.checkpoint, runtime, program.log)
    checkpoints = RunCheckpoints(config, runtime, parts, program.tokenizer, saver, program.log, live.show)
    kept_open.callback(checkpoints.close)
    continuation = setup.continuation
    if continuation is not None and saver is not None:
        # This process may continue after a restart: its thread must not write into a folder that is being repaired.
        kept_open.callback(saver.wait_for_thread)
    with timers("load-checkpoint"):
        if setup.held is not None:
            train_state = _continue_held(setup.held, checkpoints)
        else:
            train_state = checkpoints.resume() if continuation is None else continuation.resume(checkpoints)
    runtime.flight.iteration = train_state.iteration
    if runtime.is_reporter and config.checkpoint.save is not None:
        record = RunRecord(config, program.launch, train_state.iteration, program.log)
        kept_open.push(lambda kind, error, trace: record.end(runtime.flight.iteration, error))
    program.log_detail(timers.report(runtime.state, ["load-checkpoint"]))
    program.log_detail(format_datetime("after model, optimizer, and learning rate scheduler are built"))
    return checkpoints, train_state


def _continue_held(held: HeldModel, checkpoints: RunCheckpoints) -> TrainState:
    """Continue from a model in memory; its earlier checkpoints in the same folder count as those of this run."""
    save = checkpoints.config.checkpoint.save
    checkpoints.go_on(held.model_record, save in held.saved_to)
    if save is not None:
        held.saved_to.add(save)
    return held.train_state


def _build_datasets(setup: RunSetup, train_state: TrainState, timers: Timers, live: LiveLine) -> DatasetSplits:
    config, program = setup.config, setup.program
    program.log_detail("> building train, validation, and test datasets ...")
    with timers("train/valid/test-data-iterators-setup"):
        targets = sample_targets(config, train_state)
        builder = program.datasets_provider(config, program.tokenizer, targets, program.log)
        if isinstance(builder, BlendedDatasetBuilder):
            builder.told = live.show_index
        datasets = build_datasets(builder, targets, setup.runtime, is_brief=program.is_brief)
    if program.is_brief:
        program.log(describe_samples(datasets, targets))
    program.log_detail(describe_datasets(datasets, config.logging.log_megatron_lines))
    program.log_detail(format_datetime("after dataloaders are built"))
    return datasets


def _train_and_evaluate(setup: RunSetup, run: TrainingRun, datasets: DatasetSplits) -> bool:
    """Train and evaluate to the end; return False if the run must first roll back to an older checkpoint."""
    config, train_state = run.config, run.train_state
    stop_reason = None
    is_evaluated = False
    is_training = not config.training.skip_train
    if is_training and train_state.iteration >= config.train_iters:
        _train_finished(run)
    elif is_training:
        if datasets.train is None:
            raise ConfigurationError(
                "there is no training data: make the first number of --split positive, or pass --train-data-path"
            )
        with closing(setup.training_source(datasets.train, train_state.consumed_train_samples)) as source:
            try:
                stop_reason = _train(run, source, setup.program.start_time)
            except Rewind:
                return False
        is_evaluated = is_evaluation_due(config, train_state.iteration)
    if stop_reason is not None:
        if setup.held is not None:
            return True  # the program does not end here
        run.log(stop_reason)
        save = config.checkpoint.save
        if config.logging.brief_log and save is not None and train_state.iteration < config.train_iters:
            script = "".join(f" --script {path}" for path in registered_scripts()[:1])
            run.log(f" > to resume: megatron train --resume {save}{script}")
        return True
    sets, record = run.evaluation_sets, run.evaluations
    left = {"validation": () if is_evaluated else sets.validation, "test": sets.test}
    if is_training and any(left.values()):
        run.log(format_training_finished(record.estimate_s([chosen for split in left.values() for chosen in split])))
    for name, title in (("validation", "val"), ("test", "test")):
        evaluate_and_report(run, left[name], is_verbose=True)
        if is_training and name in record.losses:
            run.log_detail(format_evaluation(f"the end of training for {title} data", record.losses[name]))
    return True


def _train_finished(run: TrainingRun) -> None:
    """Print Megatron's lines of a training without iterations, and save."""
    run.log("training ...")
    run.log_detail(format_datetime("before the start of training step"))
    run.log(f"all {run.config.train_iters} iterations are done; a larger --train-iters continues the run")
    run.log_detail(format_datetime("after training is done"))
    save_finished(run)


def _go_back(setup: RunSetup, run: TrainingRun, datasets: DatasetSplits) -> TrainingRun:
    """Return the run rolled back to its newest validated checkpoint, with the samples skipped since."""
    config, runtime = setup.config, setup.runtime
    train_state = run.checkpoints.go_back()
    assert train_state is not None, "the guard has seen that there is such a checkpoint"
    if setup.continuation is not None:
        setup.continuation.forget_copies()
    if run.metrics is not None:
        run.metrics.close()
    counter = run.counter
    if counter is not None and datasets.history is not None:
        recorded = recorded_history(train_state.train_data)
        at_start = datasets.history if recorded is None else datasets.history.counted_as(recorded)
        counter = _read_counter(config, dataclasses.replace(datasets, history=at_start))
    return dataclasses.replace(
        run,
        train_state=train_state,
        evaluation_sets=plan_evaluation(config, datasets, train_state, setup.source),
        counter=counter,
        metrics=open_metrics(config, runtime, train_state.iteration, blend_names(datasets.train)),
    )


def _make_guard(
    setup: RunSetup,
    parts: ModelAndOptimizer,
    checkpoints: RunCheckpoints,
    train: SampleDataset | ExternalSamples,
    train_state: TrainState,
) -> AnomalyDetector:
    """Create the anomaly detector of a run's training steps."""
    return AnomalyDetector(
        setup.config,
        setup.runtime,
        parts,
        setup.program.forward_step,
        lambda consumed_samples, shift: setup.training_source(train, consumed_samples, shift),
        SkippedSamples.from_dict(train_state.train_data),
        checkpoints.newest_known,
        setup.program.log,
    )


def _read_counter(config: RunConfig, datasets: DatasetSplits) -> ReadCounter | None:
    """Create the counter of samples per data set; None for data that is not read from files."""
    if datasets.history is None or datasets.train is None or isinstance(datasets.train, ExternalSamples):
        return None
    return ReadCounter(datasets.history, datasets.train, sample_order(datasets.train, config))


def _train(run: TrainingRun, train_source: BatchSource, start_time: float) -> str | None:
    exit_request = ExitRequest(run.config.training, start_time, has_run_failed)
    run.log("training ...")
    run.log_detail(format_datetime("before the start of training step"))
    try:
        reason = train(run, train_source, exit_request)
    finally:
        exit_request.close()
    run.log_detail(format_datetime("after training is done"))
    return reason
