"""Warning that the time after a signal may be too short for a checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.training.callbacks.callback import Callback, TrainingRun
from megatron.training.loggers import StepReport

_WORTH_SAYING_AGAIN = 1.5


class ExitWarning(Callback):
    """Comparison of the time that a run may need from a signal to a complete checkpoint with its limit.

    All ranks check for signals once per iteration. A signal that comes right after a check is seen at the next one, and
    then the checkpoint is saved. With ``is_async`` saves, a save in progress finishes first. Without ``seconds``
    nothing is compared.
    """

    def __init__(self, seconds: int | None, is_async: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._num_saves = 2 if is_async else 1
        self._clock = clock
        self._begin()

    def _begin(self) -> None:
        self._looked: float | None = None
        self._longest_wait = 0.0
        self._said = 0.0

    def on_begin(self, run: TrainingRun) -> None:
        self._begin()

    def after_skip(self, run: TrainingRun) -> None:
        self.look()

    def after_step(self, run: TrainingRun, report: StepReport) -> None:
        self.look()

    def after_iteration(self, run: TrainingRun) -> None:
        line = self.line(run.checkpoints.last_seconds)
        if line is not None:
            run.log(line)

    def look(self) -> None:
        """Record that the ranks check for signals now."""
        now = self._clock()
        if self._looked is not None:
            self._longest_wait = max(self._longest_wait, now - self._looked)
        self._looked = now

    def line(self, save_seconds: float | None) -> str | None:
        """Return the warning, if it is due after a save of this duration; it is repeated if the time has grown much."""
        if self.seconds is None or save_seconds is None:
            return None
        needed = self._longest_wait + self._num_saves * save_seconds
        if needed <= max(self.seconds, self._said * _WORTH_SAYING_AGAIN):
            return None
        self._said = needed
        under_way = ", including a save in progress" if self._num_saves > 1 else ""
        return (
            f"WARNING: from a signal to a complete checkpoint this run may need {needed:.1f} s "
            f"({self._longest_wait:.1f} s until it looks for signals, {save_seconds:.1f} s for a "
            f"checkpoint{under_way}), but --preemption-grace-seconds is only {self.seconds}: it may be killed before; "
            "configure the scheduler to send the signal earlier"
        )
