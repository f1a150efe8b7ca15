"""The training loop: step, log, evaluate, save, and the reasons to stop."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from megatron.checkpoint.train_state import TrainState
from megatron.config.run_config import RunConfig
from megatron.core.collectives import raise_on_all_ranks
from megatron.core.console import print_line
from megatron.core.datasets.sample_keys import ReadCounter
from megatron.core.distributed.weight_checks import check_replicas_equal, compare_over_replicas
from megatron.core.errors import TrainingError
from megatron.core.timers import Timers, format_report
from megatron.training.batch_source import BatchSource
from megatron.training.callbacks.layer_statistics import (
    AttentionLogits,
    format_layer_norms,
    layer_norm_scalars,
    measure_layer_norms,
)
from megatron.training.callbacks.live_line import LiveLine
from megatron.training.callbacks.periodic_evals import ModelLooks
from megatron.training.callbacks.profiling import Profiling, ScheduleRecorder
from megatron.training.callbacks.progress_log import ProgressLog
from megatron.training.callbacks.stragglers import StragglerReport, Stragglers
from megatron.training.checkpointing import RunCheckpoints
from megatron.training.dist_signal_handler import ExitRequest, ExitWarning
from megatron.training.evaluation import EvaluationSet, EvaluationSets, evaluate_weights
from megatron.training.fault_tolerance.anomaly_detector import AnomalyDetector
from megatron.training.initialize import Runtime
from megatron.training.loggers.log_lines import (
    IntervalAverage,
    StepReport,
    format_evaluation,
    format_first_step,
    format_memory,
    format_step,
    pinned_memory_told,
)
from megatron.training.loggers.metrics import MetricsWriter
from megatron.training.model_setup import ModelAndOptimizer
from megatron.training.resume import ResumeState
from megatron.training.step_reduction import StepReduction, agree_to_exit
from megatron.training.theoretical_memory_usage import describe_theoretical_memory, model_size
from megatron.training.training_step import ForwardStep, TrainingStep


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """Hold everything that the loop works on; the loop itself keeps nothing between iterations but the averages."""

    config: RunConfig
    runtime: Runtime
    parts: ModelAndOptimizer
    forward_step: ForwardStep
    train_state: TrainState
    looks: ModelLooks
    evaluation_sets: EvaluationSets
    counter: ReadCounter | None
    metrics: MetricsWriter | None
    timers: Timers
    checkpoints: RunCheckpoints
    profiling: Profiling
    progress: ProgressLog | None = None
    guard: AnomalyDetector | None = None
    stragglers: Stragglers | None = None
    continuation: ResumeState | None = None
    live: LiveLine | None = None

    def log(self, text: str) -> None:
        """Print on the reporting rank."""
        if self.runtime.is_reporter:
            print_line(text)


def train(run: TrainingRun, train_source: BatchSource, exit_request: ExitRequest) -> str | None:
    """Train until the last iteration; return why the run was stopped before it, or None.

    The newest checkpoint is of the last iteration when this returns, where ``--save`` is given.
    """
    config, state = run.config, run.train_state
    profiling, parts = run.profiling, run.parts
    recorder = ScheduleRecorder(config, run.runtime)
    timers, action_clock = profiling.timers(run.timers), recorder.action_clock(profiling.action_clock)
    observer = partial(_observe_gradients, run) if _observes_gradients(config) else None
    watchers = (timers, observer, action_clock, run.guard)
    step = TrainingStep(config, run.runtime, parts, run.forward_step, *watchers, train_source.data_sets)
    logits = None
    if config.logging.log_max_attention_logit:
        logits = AttentionLogits(parts.chunks, run.runtime.device.torch_device)
    average = IntervalAverage()
    warning = ExitWarning(config.checkpoint.exit_warning_seconds, config.checkpoint.async_save)
    saved_iteration = state.iteration
    first_log = True
    reason = None
    _begin_garbage_collection(config)
    while state.iteration < config.train_iters and reason is None:
        batch_size = config.training.batch_sizes.global_batch_size_at(state.consumed_train_samples)
        if _skip_step(run, train_source, batch_size):
            agreement = agree_to_exit(exit_request, run.runtime)
            run.runtime.flight.iteration = state.iteration
            run.checkpoints.poll()
        else:
            profiling.begin_iteration(state.iteration, parts.chunks)
            if logits is not None:
                logits.is_on = _is_due(config.logging.log_interval, state.iteration + 1)
            report, agreement = step.run(state, train_source, batch_size, exit_request)
            profiling.end_iteration(state.iteration)
            recorder.end_iteration(state.iteration)
            run.runtime.flight.end_iteration(state.iteration, report.step_time_s)
            if logits is not None and logits.is_on:
                report = replace(report, max_attention_logit=logits.take(run.runtime.state.world))
            stragglers = None
            if run.stragglers is not None:
                run.stragglers.end_iteration(state.iteration)
                if _is_due(config.logging.log_interval, state.iteration):
                    stragglers = run.stragglers.report(state.iteration)
                    report = replace(report, stragglers=stragglers.figures())
            run.runtime.flight.ensure_not_given_up()  # What was read since the ranks agreed is logged from here on.
            run.checkpoints.poll()
            run.checkpoints.note_step(state.iteration, not report.is_skipped)
            if run.guard is not None and not report.is_skipped:
                run.guard.accepted(report)
            average.add(report)
            if run.live is not None:
                run.live.step(report)
            _write_metrics(run, report)
            if _is_due(config.training.check_weight_hash_across_dp_replicas_interval, state.iteration):
                _compare_replicas(run)
            with_memory = _is_due(config.logging.log_memory_interval, state.iteration)
            if state.iteration % config.logging.log_interval == 0:
                _log_iterations(run, report, average, with_memory=first_log or with_memory)
                if stragglers is not None:
                    _log_stragglers(run, stragglers)
                average, first_log = IntervalAverage(), False
                if run.guard is not None:
                    run.guard.log_variation()
            else:
                if run.runtime.flight.iterations_done == 1:
                    run.log(format_first_step(report, config.train_iters, config.logging.log_throughput))
                if with_memory:
                    _log_memory(run)
        warning.look()
        if is_evaluation_due(config, state.iteration):
            if agreement.signal_received and warning.seconds is not None:
                _leave_evaluation_out(run, run.evaluation_sets.validation)
            else:
                evaluate_and_report(run, run.evaluation_sets.validation)
        run.looks.take(state.iteration, run.metrics)
        reason = _exit_reason(config, state.iteration, agreement)
        if _is_due(config.checkpoint.save_interval, state.iteration) or reason is not None:
            _save(run)
            saved_iteration = state.iteration
        if run.continuation is not None:
            _end_iteration(run, run.continuation)
        line = warning.line(run.checkpoints.last_seconds)
        if line is not None:
            run.log(line)
        _collect_garbage(config, state.iteration)
        if config.training.empty_unused_memory_level >= 1:
            run.runtime.device.empty_cache()
    if saved_iteration != state.iteration:
        _save(run)
    run.checkpoints.finish()
    return reason


def evaluate_and_report(run: TrainingRun, evaluation_sets: Sequence[EvaluationSet], is_verbose: bool = False) -> None:
    """Evaluate on each set, print the framed line and write the figure down; where it is verbose, count along."""
    iteration = run.train_state.iteration
    for chosen in evaluation_sets:
        count = chosen.num_microbatches
        begin = _evaluation_counter(run, count) if is_verbose else lambda microbatch: None
        if run.live is not None:
            begin = run.live.counting(begin, count)
        with run.timers("evaluate", log_level=0), chosen.open_source() as source:
            losses = evaluate_weights(run.config, run.runtime, run.parts, run.forward_step, source, count, begin)
        _report_time(run, "evaluate")
        run.train_state.consumed_valid_samples += chosen.num_advanced
        for suffix, which, lm_loss in losses:
            run.log(format_evaluation(f"iteration {iteration} on {chosen.title}{which}", lm_loss))
            if run.metrics is not None:
                run.metrics.write({"iteration": iteration, "split": chosen.name + suffix, "lm_loss": lm_loss})
                run.metrics.evaluation_scalars(chosen.name + suffix, lm_loss, run.train_state)


def _leave_evaluation_out(run: TrainingRun, evaluation_sets: Sequence[EvaluationSet]) -> None:
    """Go past the samples of an evaluation for which there is no time: later ones read what they would have read."""
    run.log(f"no evaluation at iteration {run.train_state.iteration}: the run is ending after a signal")
    run.train_state.consumed_valid_samples += sum(chosen.num_advanced for chosen in evaluation_sets)


def is_evaluation_due(config: RunConfig, iteration: int) -> bool:
    return _is_due(config.validation.eval_interval, iteration)


def _evaluation_counter(run: TrainingRun, num_microbatches: int) -> Callable[[int], None]:
    """Return what prints Megatron's line on each global batch of an evaluation as its first micro-batch begins."""
    training = run.config.training
    samples_per_microbatch = training.micro_batch_size * run.config.data_parallel_size
    per_iteration = training.global_batch_size // samples_per_microbatch
    run.log(f"Evaluating on {num_microbatches * samples_per_microbatch} samples")

    def begin(microbatch: int) -> None:
        if microbatch % per_iteration == 0:
            run.log(f"Evaluating iter {microbatch // per_iteration + 1}/{-(-num_microbatches // per_iteration)}")

    return begin


def _report_time(run: TrainingRun, name: str) -> None:
    """Print the time of something that is no part of an iteration; every rank must call."""
    run.log(run.timers.report(run.runtime.state, [name]))


def _save(run: TrainingRun) -> None:
    if run.config.checkpoint.save is None:
        return
    state = run.train_state
    _record_data(run)
    with pinned_memory_told(run.runtime, state.iteration), run.timers("save-checkpoint", log_level=0):
        is_saved = run.checkpoints.save(state)
    _report_time(run, "save-checkpoint")
    if is_saved and run.progress is not None:
        run.progress.save(state, is_async=run.config.checkpoint.async_save)


def _record_data(run: TrainingRun) -> None:
    """Write down in the state what was read of each data set."""
    state = run.train_state
    if run.counter is not None:
        state.train_data = run.counter.history_at(state.consumed_train_samples).to_dict()
    if run.guard is not None and (left_out := run.guard.left_out.to_dict()):
        state.train_data = {**(state.train_data or {}), **left_out}


def _end_iteration(run: TrainingRun, continuation: ResumeState) -> None:
    """Prepare for a restart after an iteration."""
    if continuation.is_copied(run.train_state.iteration):
        _record_data(run)
    continuation.end_iteration(run.checkpoints, run.train_state)


def _compare_replicas(run: TrainingRun) -> None:
    """Compare the weights of the data-parallel copies, bit for bit.

    Raises:
        TrainingError: they differ, on every rank alike; the message names the parameters.
    """
    for chunk in run.parts.ddp_chunks:
        chunk.finish_param_gather()
    parameters = [parameter for chunk in run.parts.chunks for parameter in chunk.parameters()]
    error = None
    try:
        check_replicas_equal(parameters, run.runtime.state)
    except TrainingError as failure:
        error = TrainingError(f"at iteration {run.train_state.iteration}: {failure}")
    raise_on_all_ranks(error, run.runtime.state.world)


def _log_memory(run: TrainingRun) -> None:
    state, with_device = run.runtime.state, run.config.logging.log_device_memory_used
    if state.dp_cp.is_first:
        print_line(format_memory(state.rank, run.train_state.iteration, run.runtime.device, with_device))


def _log_iterations(run: TrainingRun, report: StepReport, average: IntervalAverage, with_memory: bool) -> None:
    logging = run.config.logging
    run.log(format_step(report, average, run.config.train_iters, logging.log_throughput))
    if with_memory and run.runtime.is_reporter:
        _log_model_size(run)
    if with_memory:
        _log_memory(run)
    if logging.timing_log_level == 0:
        return  # Nothing is timed for which the ranks would wait for each other.
    times = run.timers.gather(run.runtime.state, normalizer=average.num_iterations)
    if run.metrics is not None and logging.log_timers_to_tensorboard:
        names = dict.fromkeys(name for of_rank in times for name in of_rank)
        longest = {f"{name}-time": max(of_rank.get(name, 0.0) for of_rank in times) / 1000.0 for name in names}
        run.metrics.scalars(longest, report.iteration)
    run.log(format_report(times, logging.timing_log_option))


def _skip_step(run: TrainingRun, train_source: BatchSource, batch_size: int) -> bool:
    """Advance past the samples of a step that are to be left out; return whether they are."""
    state, config = run.train_state, run.config
    guard, first = run.guard, state.consumed_train_samples
    reason = None if guard is None else guard.passes_over(state.iteration, first, batch_size)
    if reason is None:
        return False
    for _ in range(batch_size // (config.training.micro_batch_size * config.data_parallel_size)):
        train_source.next()
    state.iteration += 1
    state.consumed_train_samples += batch_size
    state.skipped_iterations += 1
    run.log(f"iteration {state.iteration}: consumed samples {first} to {first + batch_size} are left out: {reason}")
    if run.metrics is not None:
        run.metrics.write(
            {
                "iteration": state.iteration,
                "consumed_samples": state.consumed_train_samples,
                "lm_loss": None,
                "skipped": True,
                "left_out": reason,
                "global_batch_size": batch_size,
            }
        )
    return True


def _observes_gradients(config: RunConfig) -> bool:
    interval = config.faults.check_gradient_hash_across_dp_replicas_interval
    return config.logging.log_layer_norms is not None or interval is not None


def _observe_gradients(run: TrainingRun) -> None:
    """Look at the reduced gradients of the iteration that is under way, where that is due.

    Raises:
        TrainingError: copies of them differ between data-parallel ranks, on every rank alike.
    """
    iteration = run.train_state.iteration + 1
    if _is_due(run.config.faults.check_gradient_hash_across_dp_replicas_interval, iteration):
        parts = [(part.spec, part.gradient) for chunk in run.parts.ddp_chunks for part in chunk.parts]
        difference = compare_over_replicas(parts, run.runtime.state, "gradients")
        error = TrainingError(f"at iteration {iteration}: {difference}") if difference else None
        raise_on_all_ranks(error, run.runtime.state.world)
    if run.config.logging.log_layer_norms is not None:
        _log_layer_norms(run)


def _log_stragglers(run: TrainingRun, report: StragglerReport) -> None:
    run.log(report.line(run.config.logging.straggler_minmax_count))
    if run.metrics is not None:
        run.metrics.scalars(report.scalars(), report.last)


def _log_layer_norms(run: TrainingRun) -> None:
    """Log the norms of each layer in the iteration that is under way, where they are due."""
    iteration, parts = run.train_state.iteration + 1, run.parts
    if not _is_due(run.config.logging.log_layer_norms, iteration):
        return
    num_layers, loss_scale = run.config.model.num_layers, parts.optimizer.loss_scale
    norms = measure_layer_norms(parts.ddp_chunks, num_layers, run.runtime.state, loss_scale)
    run.runtime.flight.ensure_not_given_up()
    run.log(format_layer_norms(iteration, norms))
    if run.metrics is not None:
        run.metrics.scalars(layer_norm_scalars(norms), iteration)


def _log_model_size(run: TrainingRun) -> None:
    """Print the numbers of parameters and the theoretical memory, where the closed form is of this model."""
    count = sum(parameter.numel() for chunk in run.parts.chunks for parameter in chunk.parameters())
    if count == model_size(run.config).shards[run.runtime.state.pp.rank]:
        run.log("\n".join(describe_theoretical_memory(run.config)))


def _write_metrics(run: TrainingRun, report: StepReport) -> None:
    if run.metrics is None:
        return
    run.metrics.write_step(report)
    if report.iteration % run.config.logging.tensorboard_log_interval == 0:
        run.metrics.step_scalars(report)


def _is_due(interval: int | None, iteration: int) -> bool:
    return bool(interval) and iteration % (interval or 1) == 0


def _exit_reason(config: RunConfig, iteration: int, agreement: StepReduction) -> str | None:
    if agreement.signal_received:
        return f"exiting program at iteration {iteration} after a signal"
    if agreement.time_is_up:
        return f"exiting program after {config.training.exit_duration_in_mins} minutes at iteration {iteration}"
    if _is_due(config.training.exit_interval, iteration):
        return f"exiting program at iteration {iteration}"
    return None


def _begin_garbage_collection(config: RunConfig) -> None:
    if config.training.manual_gc:
        gc.disable()
        gc.collect()


def _collect_garbage(config: RunConfig, iteration: int) -> None:
    interval = config.training.manual_gc_interval
    if config.training.manual_gc and interval and iteration % interval == 0:
        gc.collect()
