"""Record of the iterations of a training."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from megatron.training.callbacks import Callback

if TYPE_CHECKING:
    from megatron.training.callbacks import TrainingRun
    from megatron.training.loggers import StepReport


@dataclasses.dataclass(eq=False)
class TrainingHistory:
    """Values of each iteration, and of the evaluations, in order; the same on every rank.

    Attributes:
        iterations: numbers of the iterations, from 1.
        losses: mean loss per token of each global batch, before its update.
        learning_rates: learning rate of each update.
        grad_norms: norm of the gradients before clipping; None if the update was skipped.
        evaluations: (iteration, data set, mean loss per token) of each evaluation during the training.
        stop_reason: why the training ended early, or None.
    """

    iterations: list[int] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    learning_rates: list[float] = dataclasses.field(default_factory=list)
    grad_norms: list[float | None] = dataclasses.field(default_factory=list)
    evaluations: list[tuple[int, str, float]] = dataclasses.field(default_factory=list)
    stop_reason: str | None = None

    def __repr__(self) -> str:
        """Return the range of the iterations and of the losses."""
        if not self.iterations:
            return "TrainingHistory(no iterations)"
        first, last = self.iterations[0], self.iterations[-1]
        return f"TrainingHistory(iterations {first} to {last}, loss {self.losses[0]:.4f} to {self.losses[-1]:.4f})"

    def extend(self, other: TrainingHistory) -> None:
        """Add the iterations of a later training."""
        for name in ("iterations", "losses", "learning_rates", "grad_norms", "evaluations"):
            getattr(self, name).extend(getattr(other, name))
        self.stop_reason = other.stop_reason

    def cut(self, iteration: int) -> None:
        """Remove the iterations after this one, and their evaluations."""
        kept = sum(number <= iteration for number in self.iterations)
        for values in (self.iterations, self.losses, self.learning_rates, self.grad_norms):
            del values[kept:]
        self.evaluations = [each for each in self.evaluations if each[0] <= iteration]


class Recorder(Callback):
    """Callback that fills the history of a training."""

    def __init__(self, history: TrainingHistory) -> None:
        self.history = history

    def on_begin(self, run: TrainingRun) -> None:
        """Forget the iterations that a rollback repeats."""
        self.history.cut(run.train_state.iteration)

    def after_step(self, run: TrainingRun, report: StepReport) -> None:
        """Add an iteration."""
        self.history.iterations.append(report.iteration)
        self.history.losses.append(report.lm_loss)
        self.history.learning_rates.append(report.learning_rate)
        self.history.grad_norms.append(report.grad_norm)

    def after_evaluation(self, run: TrainingRun, split: str, lm_loss: float) -> None:
        """Add the loss of a data set."""
        self.history.evaluations.append((run.train_state.iteration, split, lm_loss))

    def on_end(self, run: TrainingRun, reason: str | None) -> None:
        """Record why the training ends."""
        self.history.stop_reason = reason
