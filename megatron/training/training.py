"""The training loop: step, log, evaluate, save and exit. All other actions are callbacks."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

from megatron.config import RunConfig
from megatron.core.console import print_line
from megatron.training.batch_source import BatchSource
from megatron.training.callbacks import MetricsLog, TrainingRun, is_due
from megatron.training.dist_signal_handler import ExitRequest
from megatron.training.evaluation import EvaluationSet, evaluate_weights
from megatron.training.loggers import (
    IntervalAverage,
    StepReport,
    format_brief_step,
    format_evaluation,
    format_memory,
    format_step,
    pinned_memory_told,
)
from megatron.training.theoretical_memory_usage import describe_theoretical_memory, model_size
from megatron.training.training_step import LaunchedStep, StepReduction, TrainingStep, agree_to_exit


def train(run: TrainingRun, train_source: BatchSource, exit_request: ExitRequest) -> str | None:
    """Train until ``run.last_iteration``; return the reason if the run was stopped before it, or None.

    With ``--save``, the newest checkpoint is of the last completed iteration when this returns.
    """
    config, state, callbacks = run.config, run.train_state, run.callbacks
    observe_gradients = partial(callbacks.on_gradients, run)
    watchers = (run.step_timers, observe_gradients, run.action_clock, run.guard)
    step = TrainingStep(config, run.runtime, run.parts, run.forward_step, *watchers, train_source.data_sets)
    log = _StepLog(run)
    saved_iteration = state.iteration
    reason = None
    unread: LaunchedStep | None = None
    """The last iteration, if its results are read after the launch of the next."""
    callbacks.on_begin(run)
    while state.iteration < run.last_iteration and reason is None:
        batch_size = config.training.batch_sizes.global_batch_size_at(state.consumed_train_samples)
        reason_to_skip = callbacks.reason_to_skip(run, batch_size)
        if reason_to_skip is not None:
            if unread is not None:
                _report_iteration(run, log, *step.finish(unread, state, train_source))
                unread = None
            agreement = _skip_iteration(run, train_source, batch_size, reason_to_skip, exit_request)
        elif step.overlaps_results:
            callbacks.before_step(run)
            run.runtime.flight.iteration = state.iteration
            try:
                launched = step.launch(state, train_source, batch_size, exit_request)
            except Exception as error:
                try:
                    _report_alone(run, log, None if unread is None else step.finish_last(unread))
                except Exception as another:
                    raise error from another
                raise
            is_ending = False
            if unread is not None:
                agreement = _report_iteration(run, log, *step.finish(unread, state, train_source))
                is_ending = agreement.signal_received or agreement.time_is_up
            unread = launched
            if is_ending or _reads_at_once(run):
                agreement = _report_iteration(run, log, *step.finish(launched, state, train_source))
                unread = None
        else:
            callbacks.before_step(run)
            agreement = _report_iteration(run, log, *step.run(state, train_source, batch_size, exit_request))
        if unread is None:
            if is_evaluation_due(config, state.iteration):
                _evaluate(run, agreement)
            callbacks.evaluate(run)
            reason = _exit_reason(config, state.iteration, agreement)
            if is_due(config.checkpoint.save_interval, state.iteration) or reason is not None:
                _save(run)
                saved_iteration = state.iteration
        callbacks.after_iteration(run)
    if saved_iteration != state.iteration:
        _save(run)
    run.checkpoints.finish()
    callbacks.on_end(run, reason)
    return reason


def save_finished(run: TrainingRun) -> None:
    """Save a run whose iterations were all done when it was started, as Megatron does; every rank must call this."""
    if run.train_state.iteration > 0:
        _save(run)
        run.checkpoints.finish()


def _reads_at_once(run: TrainingRun) -> bool:
    """Return whether the results of the launched iteration are needed before the next one is launched."""
    config, iteration = run.config, run.train_state.iteration
    intervals = (
        config.logging.log_memory_interval,
        config.logging.generate_interval,
        config.validation.eval_interval,
        config.validation.eval_tasks_interval,
        config.checkpoint.save_interval,
        config.training.exit_interval,
    )
    return (
        # The first step may create state, and its time is not typical.
        run.runtime.flight.iterations_done == 0
        or run.log_interval.is_due(iteration)
        or iteration == run.last_iteration
        or any(is_due(interval, iteration) for interval in intervals)
    )


def _report_iteration(run: TrainingRun, log: _StepLog, report: StepReport, agreement: StepReduction) -> StepReduction:
    """Report a trained iteration and log it; return the values that the ranks agreed on."""
    flight = run.runtime.flight
    report = run.callbacks.measure(run, report)
    flight.end_iteration(report.iteration, report.step_time_s)
    flight.ensure_not_given_up()  # Values read after the ranks agreed are logged from here on, so they must be valid.
    run.checkpoints.poll()
    run.checkpoints.note_step(report.iteration, not report.is_skipped)
    run.callbacks.after_step(run, report)
    log.add(report)
    per_microbatch = run.config.training.micro_batch_size * run.config.data_parallel_size
    num_microbatches = report.global_batch_size // per_microbatch
    run.evaluations.step_s = report.step_time_s / num_microbatches
    return agreement


def _report_alone(run: TrainingRun, log: _StepLog, report: StepReport | None) -> None:
    """Log the last iteration, if it has valid results, on a rank whose next launch failed.

    No registered callback is called, because it may communicate, and the other ranks do not call it.
    """
    if report is not None:
        MetricsLog().after_step(run, report)
        log.add(report)


def _skip_iteration(
    run: TrainingRun, train_source: BatchSource, batch_size: int, reason: str, exit_request: ExitRequest
) -> StepReduction:
    """Skip the samples of an iteration; return the values that the ranks agreed on."""
    state, config = run.train_state, run.config
    first = state.consumed_train_samples
    for _ in range(batch_size // (config.training.micro_batch_size * config.data_parallel_size)):
        train_source.next()
    state.iteration += 1
    state.consumed_train_samples += batch_size
    state.skipped_iterations += 1
    run.log(f"iteration {state.iteration}: consumed samples {first} to {first + batch_size} are skipped: {reason}")
    run.log_metrics(
        {
            "iteration": state.iteration,
            "consumed_samples": state.consumed_train_samples,
            "lm_loss": None,
            "skipped": True,
            "left_out": reason,
            "global_batch_size": batch_size,
        }
    )
    agreement = agree_to_exit(exit_request, run.runtime)
    run.runtime.flight.iteration = state.iteration
    run.checkpoints.poll()
    run.callbacks.after_skip(run)
    return agreement


class _StepLog:
    """Prints a line on the iterations of each ``--log-interval``, and one on the first iteration of a run."""

    def __init__(self, run: TrainingRun) -> None:
        self._run = run
        self._average = IntervalAverage()
        self._is_first = True

    def add(self, report: StepReport) -> None:
        """Add an iteration, and print the lines that are due after it; every rank must call this."""
        run, options = self._run, self._run.config.logging
        self._average.add(report)
        with_memory = is_due(options.log_memory_interval, report.iteration)
        if run.log_interval.is_due(report.iteration):
            with_sizes = self._is_first and not options.brief_log
            with_memory |= with_sizes
            run.log(self._line(report, self._average))
            if with_memory and run.runtime.is_reporter and not options.brief_log:
                _log_model_size(run)
            if with_memory:
                _log_memory(run)
            run.callbacks.on_log(run, report, self._average)
            run.log_interval.adapt(self._average, run.runtime.state.world)
            self._average, self._is_first = IntervalAverage(), False
        else:
            if run.runtime.flight.iterations_done == 1:
                # The line of a first iteration without a line of its own; the next averages include the iteration.
                alone = IntervalAverage()
                alone.add(report)
                run.log(self._line(report, alone))
            if with_memory:
                _log_memory(run)

    def _line(self, report: StepReport, average: IntervalAverage) -> str:
        options, train_iters = self._run.config.logging, self._run.config.train_iters
        if options.brief_log:
            return format_brief_step(report, average, train_iters, options.log_throughput)
        return format_step(report, average, train_iters, options.log_throughput)


def _evaluate(run: TrainingRun, agreement: StepReduction) -> None:
    """Evaluate on the validation sets; if a signal leaves no time for it, skip their samples."""
    evaluation_sets = run.evaluation_sets.validation
    if agreement.signal_received and run.config.checkpoint.preemption_grace_seconds is not None:
        run.log(f"no evaluation at iteration {run.train_state.iteration}: the run is ending after a signal")
        run.train_state.consumed_valid_samples += sum(chosen.num_advanced for chosen in evaluation_sets)
    else:
        evaluate_and_report(run, evaluation_sets)


def evaluate_and_report(run: TrainingRun, evaluation_sets: Sequence[EvaluationSet], is_verbose: bool = False) -> None:
    """Evaluate on each set, and log and record the losses; with ``is_verbose``, also log the progress."""
    iteration = run.train_state.iteration
    for chosen in evaluation_sets:
        count = chosen.num_microbatches
        begin = _evaluation_counter(run, chosen, is_verbose)
        start = time.perf_counter()
        with run.timers("evaluate", log_level=0), chosen.open_source() as source:
            losses = evaluate_weights(run.config, run.runtime, run.parts, run.forward_step, source, count, begin)
        run.evaluations.add(count, time.perf_counter() - start)
        _report_time(run, "evaluate")
        run.train_state.consumed_valid_samples += chosen.num_advanced
        run.evaluations.losses[chosen.name] = losses[0][-1]
        for suffix, which, lm_loss in losses:
            heading = f"iteration {iteration} on {chosen.title}{which}"
            run.log(format_evaluation(heading, lm_loss, is_brief=run.config.logging.brief_log))
            run.callbacks.after_evaluation(run, chosen.name + suffix, lm_loss)


def is_evaluation_due(config: RunConfig, iteration: int) -> bool:
    return is_due(config.validation.eval_interval, iteration)


def _evaluation_counter(run: TrainingRun, chosen: EvaluationSet, is_verbose: bool) -> Callable[[int], None]:
    """Return a function that shows an evaluation's progress when a micro-batch starts.

    With ``is_verbose``, it also prints Megatron's line for each global batch.
    """
    training, num_microbatches = run.config.training, chosen.num_microbatches
    per_iteration = training.global_batch_size // (training.micro_batch_size * run.config.data_parallel_size)
    is_verbose &= not run.config.logging.brief_log
    if is_verbose:
        run.log(f"Evaluating on {chosen.num_samples} samples")

    def begin(microbatch: int) -> None:
        if is_verbose and microbatch % per_iteration == 0:
            run.log(f"Evaluating iter {microbatch // per_iteration + 1}/{-(-num_microbatches // per_iteration)}")
        run.show_progress(microbatch, num_microbatches)

    return begin


def _save(run: TrainingRun) -> None:
    if run.config.checkpoint.save is None:
        return
    state = run.train_state
    run.callbacks.before_save(run)
    with pinned_memory_told(run.runtime, state.iteration), run.timers("save-checkpoint", log_level=0):
        is_saved = run.checkpoints.save(state)
    _report_time(run, "save-checkpoint")
    if is_saved:
        run.callbacks.after_save(run)


def _report_time(run: TrainingRun, name: str) -> None:
    """Print the time of an operation outside of the iterations; every rank must call this."""
    run.log_detail(run.timers.report(run.runtime.state, [name]))


def _log_memory(run: TrainingRun) -> None:
    state, with_device = run.runtime.state, run.config.logging.log_device_memory_used
    if state.dp_cp.is_first:
        print_line(format_memory(state.rank, run.train_state.iteration, run.runtime.device, with_device))


def _log_model_size(run: TrainingRun) -> None:
    """Print the parameter counts and the theoretical memory, if the closed form covers this model."""
    count = sum(parameter.numel() for chunk in run.parts.chunks for parameter in chunk.parameters())
    if count == model_size(run.config).shards[run.runtime.state.pp.rank]:
        run.log("\n".join(describe_theoretical_memory(run.config)))


def _exit_reason(config: RunConfig, iteration: int, agreement: StepReduction) -> str | None:
    if agreement.signal_received:
        return f"exiting program at iteration {iteration} after a signal"
    if agreement.time_is_up:
        return f"exiting program after {config.training.exit_duration_in_mins} minutes at iteration {iteration}"
    if is_due(config.training.exit_interval, iteration):
        return f"exiting program at iteration {iteration}"
    return None
