"""The callback protocol: the moments of a run at which something else may happen, and what a callback is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.checkpoint import TrainState
from megatron.config import RunConfig
from megatron.core.console import print_line
from megatron.core.datasets import ReadCounter
from megatron.core.dist_checkpointing import Progress, ignore_progress
from megatron.core.pipeline_parallel import Action
from megatron.core.timers import Timers
from megatron.training import EvaluationSets, ForwardStep, ModelAndOptimizer, RunCheckpoints, Runtime, StepGuard
from megatron.training.loggers import IntervalAverage, MetricsWriter, StepReport

ActionClock = Callable[[Sequence[Action]], "Callable[[], float] | None"]
"""Return the clock of the executor for the actions of an iteration; None for one that needs none."""


class Callback:
    """A base class of what happens at moments of a run.

    Each method is a moment, and does nothing unless a subclass overrides it. Every rank calls the moments in this
    order::

        on_begin
        for each iteration:
            reason_to_skip
            after_skip, or before_step, on_gradients, measure, after_step, on_log
            after_evaluation for each set, if an evaluation is due
            evaluate
            before_save, after_save, if a checkpoint is due
            after_iteration
        on_end

    A callback may read all of ``run``. It may change only what the description of a moment names. A callback that
    communicates does so on every rank, in the same order. An exception ends the run. Raise a `TrainingError` on all
    ranks to end it with a message and without a traceback.
    """

    def on_begin(self, run: TrainingRun) -> None:
        """Training begins, at the start of a run and again after it has gone back to an older checkpoint."""

    def reason_to_skip(self, run: TrainingRun, batch_size: int) -> str | None:
        """Return why the samples of the next iteration are to be skipped, equal on all ranks; None to train on them.

        The first callback that returns a reason decides.
        """
        return None

    def after_skip(self, run: TrainingRun) -> None:
        """The samples of an iteration were skipped; ``run.train_state`` counts it."""

    def before_step(self, run: TrainingRun) -> None:
        """An iteration begins; ``run.train_state.iteration`` counts those before it."""

    def on_gradients(self, run: TrainingRun) -> None:
        """The gradients are reduced, and not yet clipped; ``run.train_state`` does not yet count the iteration.

        It may read the gradients in ``run.parts.ddp_chunks``. A step that is computed again calls this again.
        """

    def measure(self, run: TrainingRun, report: StepReport) -> StepReport:
        """Return the figures of the iteration that has ended, with more among them; equal on all ranks.

        An entry in ``auxiliary`` is in the log line, the metrics file and TensorBoard. Print and write nothing here:
        the ranks may have given communication up.
        """
        return report

    def after_step(self, run: TrainingRun, report: StepReport) -> None:
        """The weights are updated, unless ``report.is_skipped``, and the figures of the iteration are complete."""

    def on_log(self, run: TrainingRun, report: StepReport, average: IntervalAverage) -> None:
        """The log line of the iterations since the last one was printed; ``average`` has their averages."""

    def after_evaluation(self, run: TrainingRun, split: str, lm_loss: float) -> None:
        """The loss of an evaluation set is known; it may come after ``on_end`` for the evaluations of the whole run."""

    def evaluate(self, run: TrainingRun) -> None:
        """An iteration has ended, with the evaluation on the validation sets if it was due: evaluate in another way."""

    def before_save(self, run: TrainingRun) -> None:
        """A checkpoint or a copy for a restart will be made; ``run.train_state`` may be completed."""

    def after_save(self, run: TrainingRun) -> None:
        """A checkpoint was saved, or with ``--async-save`` begun."""

    def after_iteration(self, run: TrainingRun) -> None:
        """Everything that belongs to an iteration is done, its checkpoint included."""

    def on_end(self, run: TrainingRun, reason: str | None) -> None:
        """Training has ended and the last checkpoint is written; ``reason`` is why it ended early, or None."""


class Callbacks(Callback):
    """Several callbacks, called in order."""

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
    """Hold everything that the loop works on; the loop itself keeps nothing between iterations but the averages.

    ``step_timers`` and ``action_clock`` are those of a training step, see `TrainingStep`; ``show_progress`` is told
    how far an evaluation is. The reporting rank alone has ``metrics``.
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
    guard: StepGuard | None = None
    show_progress: Progress = ignore_progress

    def log(self, text: str) -> None:
        """Print on the reporting rank."""
        if self.runtime.is_reporter:
            print_line(text)

    def log_metrics(self, values: Mapping[str, Any]) -> None:
        """Append an object to the metrics file, on the reporting rank."""
        if self.metrics is not None:
            self.metrics.write(values)

    def log_scalars(self, values: Mapping[str, float | None], iteration: int) -> None:
        """Give figures to TensorBoard and the other loggers, on the reporting rank."""
        if self.metrics is not None:
            self.metrics.scalars(values, iteration)


def is_due(interval: int | None, iteration: int) -> bool:
    """Return whether something with this interval happens after an iteration; None and 0 are never."""
    return bool(interval) and iteration % (interval or 1) == 0
