"""Run a training from its configuration to its exit status: set up, resume, train, evaluate."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass

from megatron.checkpoint.train_state import TrainState
from megatron.config.run_config import RunConfig
from megatron.core.available_host_memory import HostRoom, available_bytes
from megatron.core.console import print_line
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedDatasetBuilder, DatasetSplits
from megatron.core.datasets.data_history import SkippedSamples, recorded_history
from megatron.core.datasets.gpt_dataset import ExternalSamples, SampleDataset
from megatron.core.datasets.sample_keys import ReadCounter, blend_names
from megatron.core.errors import ConfigurationError, InputError, MegatronError, TrainingError
from megatron.core.timers import Timers
from megatron.core.tokenizers.tokenizer import Tokenizer
from megatron.training.autotune import choose_library, choose_tp_overlap
from megatron.training.batch_source import BatchSource, build_datasets, sample_order
from megatron.training.callbacks.live_line import LiveLine
from megatron.training.callbacks.periodic_evals import open_looks
from megatron.training.callbacks.profiling import Profiling
from megatron.training.callbacks.progress_log import open_progress
from megatron.training.callbacks.stragglers import PartsClock, Stragglers
from megatron.training.checkpointing import RunCheckpoints, open_saver
from megatron.training.data_plan import DatasetsProvider, sample_targets
from megatron.training.dist_signal_handler import ExitRequest
from megatron.training.evaluation import plan_evaluation
from megatron.training.exit_reason import reasons_of, refuse_in_run, report_failure
from megatron.training.fault_tolerance.anomaly_detector import AnomalyDetector
from megatron.training.fault_tolerance.inprocess_restart import RendezvousMember, train_with_restarts
from megatron.training.fault_tolerance.step_replay import Rewind
from megatron.training.fault_tolerance.supervisor import REPLACE, KeptRank
from megatron.training.fault_tolerance.watchdog import phase_marker, watching
from megatron.training.initialize import (
    LaunchEnvironment,
    Runtime,
    has_run_failed,
    initialize_runtime,
    is_first_failure,
    shut_down,
)
from megatron.training.loggers.experiment_loggers import check_packages, check_services
from megatron.training.loggers.log_lines import format_datetime
from megatron.training.loggers.metrics import open_metrics
from megatron.training.loggers.run_record import RunRecord
from megatron.training.loggers.startup_lines import (
    describe_batch_and_tokenizer,
    describe_buckets,
    describe_datasets,
    describe_initialized,
    describe_precision,
    log_arguments,
)
from megatron.training.model_setup import (
    ModelAndOptimizer,
    ModelProvider,
    build_model_and_optimizer,
    with_transformer_impl,
)
from megatron.training.preflight import check_host_memory
from megatron.training.resume import ResumeState, find_continuation
from megatron.training.training import TrainingRun, evaluate_and_report, is_evaluation_due, train
from megatron.training.training_step import ForwardStep

Log = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class Application:
    """Hold what a run is made from."""

    config: RunConfig
    runtime: Runtime
    tokenizer: Tokenizer
    model_provider: ModelProvider
    datasets_provider: DatasetsProvider
    forward_step: ForwardStep
    log: Log
    launch: LaunchEnvironment = dataclasses.field(default_factory=LaunchEnvironment)
    continuation: ResumeState | None = None

    def source(
        self,
        dataset: SampleDataset | ExternalSamples,
        consumed_samples: int,
        whole_set: int | None = None,
    ) -> BatchSource:
        """Return the micro-batches of a data set from a position on, or of ``whole_set`` samples, each once."""
        vocab_size = self.tokenizer.vocab_size
        return BatchSource(dataset, self.config, self.runtime, vocab_size, consumed_samples, whole_set, evaluates=True)

    def training_source(
        self, dataset: SampleDataset | ExternalSamples, consumed_samples: int, shift: int = 0
    ) -> BatchSource:
        """Return the micro-batches that are trained on, which tell a blend's data sets apart; see `BatchSource`."""
        place = (self.config, self.runtime, self.tokenizer.vocab_size, consumed_samples)
        return BatchSource(dataset, *place, shift=shift, tells_data_sets=True)


def pretrain(
    config: RunConfig,
    launch: LaunchEnvironment,
    tokenizer: Tokenizer,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
    kept: KeptRank | None = None,
) -> int:
    """Train as configured and return the exit status: 0 done, 2 wrong input, 1 failed.

    Tokenizer and data were checked before (see `prepare_data_or_exit`). Errors that are the user's to mend are printed
    once, without a traceback. With ``--inprocess-restart`` the process is a worker of `keep_rank`, which has returned
    ``kept``; it may then also be `REPLACE` that is returned, for the keeper.
    """
    start_time = time.time() if kept is None else kept.started

    try:
        _check_offload(config, launch, tokenizer)
    except ConfigurationError as error:
        return refuse_in_run(reasons_of(error), launch)

    def attempt(member: RendezvousMember | None) -> int:
        providers = (model_provider, datasets_provider, forward_step)
        return _pretrain_once(config, launch, tokenizer, *providers, start_time, member)

    if not config.restart.inprocess_restart:
        return attempt(None)
    try:
        return train_with_restarts(config, launch, kept, attempt)
    except MegatronError as error:
        return refuse_in_run(reasons_of(error), launch, status=2 if isinstance(error, InputError) else 1)


def _pretrain_once(
    config: RunConfig,
    launch: LaunchEnvironment,
    tokenizer: Tokenizer,
    model_provider: ModelProvider,
    datasets_provider: DatasetsProvider,
    forward_step: ForwardStep,
    start_time: float,
    member: RendezvousMember | None,
) -> int:
    """Train in one set of process groups; with a ``member`` errors that are no answer to the user are raised."""
    log = _printer(launch)
    try:
        check_packages(config)
        if launch.rank == 0:
            check_services(config)
        log(f"{_describe_world(config)}\n{describe_precision(config)}")
        log_arguments(config, log)
        log(describe_batch_and_tokenizer(config))
        config = with_vocabulary(config, tokenizer, log)
        log("> initializing torch distributed ...")
        runtime = initialize_runtime(config, launch, None if member is None else member.store)
        if member is not None:
            member.links.are_made(runtime.flight)
        with _watching(config, runtime):
            continuation = None
            if member is not None:
                config, continuation = find_continuation(config, runtime, launch, member)
            config = choose_library(config, runtime, log)
            config = choose_tp_overlap(config, runtime, log)
            config = with_transformer_impl(config, runtime, log)
            log(describe_initialized(config, start_time))
            providers = (model_provider, datasets_provider, forward_step)
            _run(Application(config, runtime, tokenizer, *providers, log, launch, continuation), start_time)
    except MegatronError as error:
        if member is not None and member.links.are_given_up:
            raise  # What it was read from is no result.
        return refuse_in_run(reasons_of(error), launch, status=2 if isinstance(error, InputError) else 1)
    except Exception as error:
        if member is not None:
            raise
        if is_first_failure():
            report_failure(error, launch)
        return 1
    shut_down()
    return 0


def _check_offload(config: RunConfig, launch: LaunchEnvironment, tokenizer: Tokenizer) -> None:
    """Reject an offload that needs more host memory than is free; no process group is needed."""
    available = available_bytes()
    room = None if available is None else HostRoom(available, launch.local_world_size)
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    check_host_memory(dataclasses.replace(config, model=model), room)


def _watching(config: RunConfig, runtime: Runtime) -> AbstractContextManager[None]:
    """Return a context in which a run that hangs is reported and ended."""
    graphs = config.training.cuda_graph_impl != "none"
    settling = 1 + (config.training.cuda_graph_warmup_steps if graphs else 0)
    seconds, folder = config.initialization.hang_report_seconds, config.checkpoint.local_save
    leave_with = REPLACE if config.restart.inprocess_restart else 1
    return watching(runtime.flight, runtime.state, runtime.device, seconds, folder, settling, leave_with)


def with_vocabulary(config: RunConfig, tokenizer: Tokenizer, log: Log) -> RunConfig:
    """Return the configuration with the tokenizer's vocabulary size, and say how far it is padded."""
    model = dataclasses.replace(config.model, vocab_size=tokenizer.vocab_size)
    padded = model.padded_vocab_size
    num_dummies = padded - model.vocab_size
    log(f" > padded vocab (size: {model.vocab_size}) with {num_dummies} dummy tokens (new size: {padded})")
    return dataclasses.replace(config, model=model)


def _run(application: Application, start_time: float) -> None:
    with (
        closing(Profiling(application.config, application.runtime, application.log)) as profiling,
        ExitStack() as kept_open,
    ):
        run, datasets = _set_up(application, profiling, kept_open)
        is_done = False
        try:
            while not is_done:
                with closing(run.evaluation_sets):
                    is_done = _train_and_evaluate(application, run, datasets, start_time)
                if not is_done:
                    run = _go_back(application, run, datasets)
            run.checkpoints.check_last()
        except TrainingError:
            # Every rank comes here: a checkpoint that is being written is worth the wait.
            run.checkpoints.finish()
            raise
        finally:
            if run.metrics is not None:
                run.metrics.close()


def _set_up(application: Application, profiling: Profiling, kept_open: ExitStack) -> tuple[TrainingRun, DatasetSplits]:
    """Build what the run works on, and bring it to where its checkpoint stands."""
    config, runtime, log = application.config, application.runtime, application.log
    live = kept_open.enter_context(LiveLine(config, runtime.flight, runtime.is_reporter))
    log_straggler = config.logging.log_straggler
    clock = PartsClock(runtime.flight, runtime.device.torch_device) if log_straggler else None
    timers = Timers(
        config.logging.timing_log_level,
        config.logging.timing_log_option,
        synchronize=runtime.device.synchronize,
        note=phase_marker(runtime.flight, None if clock is None else clock.mark),
    )
    log(f"building {type(config.model).__name__.removesuffix('Config')} model ...")
    with timers("model-and-optimizer-setup"):
        parts = build_model_and_optimizer(config, runtime, application.model_provider, log)
    buckets = describe_buckets(parts.ddp_chunks, runtime.state, config.logging.log_megatron_lines)
    if buckets is not None:
        print_line(buckets)
    log(f"> learning rate decay style: {config.scheduler.lr_decay_style}")
    saver = open_saver(config.checkpoint, runtime, log)
    checkpoints = RunCheckpoints(config, runtime, parts, application.tokenizer, saver, log, live.show)
    kept_open.callback(checkpoints.close)
    continuation = application.continuation
    if continuation is not None and saver is not None:
        # This process may go on: nothing of it may write into a folder that is brought in order again.
        kept_open.callback(saver.wait_for_thread)
    with timers("load-checkpoint"):
        train_state = checkpoints.resume() if continuation is None else continuation.resume(checkpoints)
    runtime.flight.iteration = train_state.iteration
    if runtime.is_reporter and config.checkpoint.save is not None:
        kept_open.callback(RunRecord(config, application.launch, train_state.iteration, log).close)
    log(timers.report(runtime.state, ["load-checkpoint"]))
    log(format_datetime("after model, optimizer, and learning rate scheduler are built"))
    log("> building train, validation, and test datasets ...")
    with timers("train/valid/test-data-iterators-setup"):
        targets = sample_targets(config, train_state)
        builder = application.datasets_provider(config, application.tokenizer, targets, log)
        if isinstance(builder, BlendedDatasetBuilder):
            builder.told = live.show_index
        datasets = build_datasets(builder, targets, runtime)
    log(describe_datasets(datasets, config.logging.log_megatron_lines))
    log(format_datetime("after dataloaders are built"))
    log(f"done with setup ...\n{timers.report(runtime.state)}")

    run = TrainingRun(
        config=config,
        runtime=runtime,
        parts=parts,
        forward_step=application.forward_step,
        train_state=train_state,
        evaluation_sets=plan_evaluation(config, datasets, train_state, application.source),
        counter=_read_counter(config, datasets),
        metrics=open_metrics(config, runtime, train_state.iteration, blend_names(datasets.train)),
        timers=timers,
        checkpoints=checkpoints,
        profiling=profiling,
        progress=open_progress(config, runtime, train_state),
        guard=None
        if datasets.train is None
        else _make_guard(application, parts, checkpoints, datasets.train, train_state),
        stragglers=None
        if clock is None
        else Stragglers(clock, runtime.state, runtime.device.torch_device, train_state.iteration),
        continuation=continuation,
        live=live,
        looks=open_looks(config, runtime, parts, application.tokenizer, live),
    )
    return run, datasets


def _train_and_evaluate(application: Application, run: TrainingRun, datasets: DatasetSplits, start_time: float) -> bool:
    """Train and evaluate to the end; return False where the run is to go back to an older checkpoint first."""
    config, train_state = run.config, run.train_state
    stop_reason = None
    is_evaluated = False
    if not config.training.skip_train and train_state.iteration < config.train_iters:
        if datasets.train is None:
            raise ConfigurationError(
                "there is no training data: give the first number of --split a share, or --train-data-path"
            )
        with closing(application.training_source(datasets.train, train_state.consumed_train_samples)) as source:
            try:
                stop_reason = _train(run, source, start_time)
            except Rewind:
                return False
        is_evaluated = is_evaluation_due(config, train_state.iteration)
    if stop_reason is not None:
        run.log(stop_reason)
        return True
    if not is_evaluated:
        evaluate_and_report(run, run.evaluation_sets.validation, is_verbose=True)
    evaluate_and_report(run, run.evaluation_sets.test, is_verbose=True)
    return True


def _go_back(application: Application, run: TrainingRun, datasets: DatasetSplits) -> TrainingRun:
    """Return the run as it was at its newest checkpoint known to train, with what was left out since."""
    config, runtime = application.config, application.runtime
    train_state = run.checkpoints.go_back()
    assert train_state is not None, "the guard has seen that there is such a checkpoint"
    if application.continuation is not None:
        application.continuation.forget_copies()
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
        evaluation_sets=plan_evaluation(config, datasets, train_state, application.source),
        counter=counter,
        metrics=open_metrics(config, runtime, train_state.iteration, blend_names(datasets.train)),
    )


def _make_guard(
    application: Application,
    parts: ModelAndOptimizer,
    checkpoints: RunCheckpoints,
    train: SampleDataset | ExternalSamples,
    train_state: TrainState,
) -> AnomalyDetector:
    """Return what watches the training steps of a run."""
    return AnomalyDetector(
        application.config,
        application.runtime,
        parts,
        application.forward_step,
        lambda consumed_samples, shift: application.training_source(train, consumed_samples, shift),
        SkippedSamples.from_dict(train_state.train_data),
        checkpoints.newest_known,
        application.log,
    )


def _read_counter(config: RunConfig, datasets: DatasetSplits) -> ReadCounter | None:
    """Return what counts the samples of each data set; None for data that is not read from files."""
    if datasets.history is None or datasets.train is None or isinstance(datasets.train, ExternalSamples):
        return None
    return ReadCounter(datasets.history, datasets.train, sample_order(datasets.train, config))


def _train(run: TrainingRun, train_source: BatchSource, start_time: float) -> str | None:
    exit_request = ExitRequest(run.config.training, start_time, has_run_failed)
    run.log("training ...")
    run.log(format_datetime("before the start of training step"))
    try:
        reason = train(run, train_source, exit_request)
    finally:
        exit_request.close()
    run.log(format_datetime("after training is done"))
    return reason


def _describe_world(config: RunConfig) -> str:
    return f"using world size: {config.world_size}, {config.parallel_sizes.describe()}"


def _printer(launch: LaunchEnvironment) -> Log:
    def log(text: str) -> None:
        if launch.rank == 0:
            print_line(text)

    return log
