"""The callback protocol: the hooks of a run, and the arguments that callbacks get."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron.checkpoint import TrainState
from megatron.config import RunConfig
from megatron.core.console import print_line
from megatron.core.datasets import ReadCounter, recorded_history
from megatron.core.dist_checkpointing import Progress, ignore_progress
from megatron.core.pipeline_parallel import Action
from megatron.core.timers import Timers
from megatron.training import (
    EvaluationRecord,
    EvaluationSets,
    ForwardStep,
    ModelAndOptimizer,
    RunCheckpoints,
    Runtime,
    StepGuard,
)
from megatron.training.loggers import IntervalAverage, LogInterval, MetricsWriter, StepReport

ActionClock = Callable[[Sequence[Action]], "Callable[[], float] | None"]
"""Returns the executor's clock for the actions of an iteration, or None if no clock is needed."""


class Callback:
    """Base class of callbacks, which act at the hooks of a run.

    Each method is a hook, and does nothing unless a subclass overrides it. Every rank calls the hooks in this order::

        on_begin
        for each iteration:
            reason_to_skip
            after_skip, or before_step, on_gradients, measure, after_step, on_log
            after_evaluation for each set, if an evaluation is due
            evaluate
            before_save, after_save, if a checkpoint is due
            after_iteration
        on_end

    With ``--overlap-step-results``, ``measure`` and ``after_step`` of an iteration may come after its own
    ``after_iteration``, and after ``before_step`` and ``on_gradients`` of the next one, which ``run.train_state`` then
    counts. A callback with ``evaluate`` is rejected. ``report`` is that of the iteration.

    A callback may read all of ``run``. It may change only the state that the description of a hook names. A callback
    that communicates does so on every rank, in the same order. An exception ends the run. Raise a `TrainingError` on
    all ranks to end it with a message and without a traceback.
    """

    def on_begin(self, run: TrainingRun) -> None:
        """Called when training starts, at the start of a run and again after a rollback to an older checkpoint."""

    def reason_to_skip(self, run: TrainingRun, batch_size: int) -> str | None:
        """Return a reason to skip the samples of the next iteration, equal on all ranks, or None to train on them.

        The first callback that returns a reason decides.
        """
        return None

    def after_skip(self, run: TrainingRun) -> None:
        """Called after the samples of an iteration were skipped; ``run.train_state`` counts the iteration."""

    def before_step(self, run: TrainingRun) -> None:
        """Called before an iteration; ``run.train_state.iteration`` is the number of completed iterations."""

    def on_gradients(self, run: TrainingRun) -> None:
        """Called after the gradients are reduced, before they are clipped; ``run.train_state`` excludes the iteration.

        A callback may read the gradients in ``run.parts.ddp_chunks``. A recomputed step calls this again.
        """

    def measure(self, run: TrainingRun, report: StepReport) -> StepReport:
        """Return the report of the completed iteration, with additional metrics; equal on all ranks.

        An entry in ``auxiliary`` appears in the log line, the metrics file and TensorBoard. Print and write nothing
        here, because communication may have been aborted.
        """
        return report

    def after_step(self, run: TrainingRun, report: StepReport) -> None:
        """Called after the weight update, which ``report.is_skipped`` may have omitted; the report is complete."""

    def on_log(self, run: TrainingRun, report: StepReport, average: IntervalAverage) -> None:
        """Called after the log line is printed; ``average`` has the averages since the previous log line."""

    def after_evaluation(self, run: TrainingRun, split: str, lm_loss: float) -> None:
        """Called with the loss of an evaluation set; the final evaluations of the run come after ``on_end``."""

    def evaluate(self, run: TrainingRun) -> None:
        """Called after an iteration, and after its evaluation on the validation sets; a callback may evaluate here."""

    def before_save(self, run: TrainingRun) -> None:
        """Called before a checkpoint or an in-memory copy is saved; ``run.train_state`` may be completed here."""

    def after_save(self, run: TrainingRun) -> None:
        """Called after a checkpoint was saved, or with ``--async-save`` after the save started."""

    def after_iteration(self, run: TrainingRun) -> None:
        """Called after all work of an iteration, including its checkpoint."""

    def on_end(self, run: TrainingRun, reason: str | None) -> None:
        """Called when training has ended and the last checkpoint is written; ``reason`` explains an early end."""


class Callbacks(Callback):
    """Sequence of callbacks, called in order."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self.callbacks = tuple(callbacks)

    def on_begin(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.on_begin(run)

    def reason_to_skip(self, run: TrainingRun, batch_size: int) -> str | None:
        for callback in self.callbacks:
            if (reason := callback.reason_to_skip(run, batch_size)) is not None:
                return reason
        return None

    def after_skip(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.after_skip(run)

    def before_step(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.before_step(run)

    def on_gradients(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.on_gradients(run)

    def measure(self, run: TrainingRun, report: StepReport) -> StepReport:
        for callback in self.callbacks:
            report = callback.measure(run, report)
        return report

    def after_step(self, run: TrainingRun, report: StepReport) -> None:
        for callback in self.callbacks:
            callback.after_step(run, report)

    def on_log(self, run: TrainingRun, report: StepReport, average: IntervalAverage) -> None:
        for callback in self.callbacks:
            callback.on_log(run, report, average)

    def after_evaluation(self, run: TrainingRun, split: str, lm_loss: float) -> None:
        for callback in self.callbacks:
            callback.after_evaluation(run, split, lm_loss)

    def evaluate(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.evaluate(run)

    def before_save(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.before_save(run)

    def after_save(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.after_save(run)

    def after_iteration(self, run: TrainingRun) -> None:
        for callback in self.callbacks:
            callback.after_iteration(run)

    def on_end(self, run: TrainingRun, reason: str | None) -> None:
        for callback in self.callbacks:
            callback.on_end(run, reason)


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """State of a run in the training loop; the loop itself keeps only averages between iterations.

    ``step_timers`` and ``action_clock`` are passed to `TrainingStep`. ``show_progress`` gets the progress of an
    evaluation. Only the reporting rank has ``metrics``. ``log_interval`` says which iterations have a log line.
    ``last_iteration`` is before ``config.train_iters`` if the caller continues the training later.
    """

    config: RunConfig
    runtime: Runtime
    parts: ModelAndOptimizer
    forward_step: ForwardStep
    train_state: TrainState
    evaluation_sets: EvaluationSets
    counter: ReadCounter | None
    metrics: MetricsWriter | None
    timers: Timers
    checkpoints: RunCheckpoints
    callbacks: Callbacks
    step_timers: Timers
    action_clock: ActionClock
    log_interval: LogInterval
    last_iteration: int
    guard: StepGuard | None = None
    evaluations: EvaluationRecord = field(default_factory=EvaluationRecord)
    show_progress: Progress = ignore_progress

    def record_data_read(self) -> None:
        """Record in ``train_state`` which samples of each data set were read, and which steps were skipped."""
        state = self.train_state
        recorded = dict(state.train_data or {})
        if self.counter is not None:
            recorded |= self.counter.history_at(state.consumed_train_samples).to_dict()
        elif (history := recorded_history(state.train_data)) is not None:
            recorded |= history.after_other_data(state.consumed_train_samples).to_dict()
        if self.guard is not None:
            recorded |= self.guard.left_out.to_dict()
        state.train_data = recorded or None

    def log(self, text: str) -> None:
        """Print a line on the reporting rank."""
        if self.runtime.is_reporter:
            print_line(text)

    def log_detail(self, text: str) -> None:
        """Print a line on the reporting rank, unless the log is brief."""
        if not self.config.logging.brief_log:
            self.log(text)

    def log_metrics(self, values: Mapping[str, Any]) -> None:
        """Append an object to the metrics file, on the reporting rank."""
        if self.metrics is not None:
            self.metrics.write(values)

    def log_scalars(self, values: Mapping[str, float | None], iteration: int) -> None:
        """Log scalars to TensorBoard and the other loggers, on the reporting rank."""
        if self.metrics is not None:
            self.metrics.scalars(values, iteration)


def is_due(interval: int | None, iteration: int) -> bool:
    """Return whether an action with this interval is due after an iteration; None and 0 mean never."""
    return bool(interval) and iteration % (interval or 1) == 0
