"""The live status line of a terminal, and the signs of life of a brief log."""

from __future__ import annotations

import shutil
import sys
import threading
import time
from types import TracebackType

from megatron.config import RunConfig
from megatron.core.console import CLEAR_LINE, SIGN_OF_LIFE_S, format_bar, format_duration, print_line
from megatron.core.flight_recorder import FlightRecorder
from megatron.training.callbacks.callback import Callback, TrainingRun
from megatron.training.loggers import IntervalAverage, StepReport, is_terminal

_REDRAW_S = 0.5
_NEW_SHARE = 0.2
_LONG_STEP_S = 5.0
"""A longer step is shown with its time so far, instead of the figures of the step before."""
_PHASES = {
    "setup": "setting up",
    "load": "loading the checkpoint",
    "save": "saving a checkpoint",
    "evaluate": "evaluating",
}


class LiveLine(Callback):
    """Status line on a terminal, redrawn repeatedly below the printed lines.

    The cursor stays at the line's start, and `print_line` clears the line before it prints another. A thread draws the
    line, so that it also updates during a long step. Without a terminal, the thread of a brief log prints the status
    when no iteration, evaluation or checkpoint was logged for `SIGN_OF_LIFE_S` seconds; other logs get nothing.
    """

    def __init__(self, config: RunConfig, flight: FlightRecorder, is_reporter: bool) -> None:
        self._is_terminal = is_terminal()
        self.is_on = is_reporter and (self._is_terminal or config.logging.brief_log)
        self._config, self._flight = config, flight
        self._report: StepReport | None = None
        self._step_s = 0.0
        self._bar = self._work = ""
        self._phase, self._since = "", time.monotonic()
        self._stepped = self._logged = time.monotonic()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._draw, name="live line", daemon=True)

    def __enter__(self) -> LiveLine:
        """Start to draw."""
        if self.is_on:
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        """Stop drawing and clear the line."""
        if self.is_on:
            self._ending.set()
            self._thread.join()
            if self._is_terminal:
                sys.stdout.write(CLEAR_LINE)
                sys.stdout.flush()

    def before_step(self, run: TrainingRun) -> None:
        self._stepped = time.monotonic()

    def on_log(self, run: TrainingRun, report: StepReport, average: IntervalAverage) -> None:
        self._logged = time.monotonic()

    def after_evaluation(self, run: TrainingRun, split: str, lm_loss: float) -> None:
        self._logged = time.monotonic()

    def after_save(self, run: TrainingRun) -> None:
        self._logged = time.monotonic()

    def after_step(self, run: TrainingRun, report: StepReport) -> None:
        self.step(report)

    def step(self, report: StepReport) -> None:
        """Update the line with an iteration's report; the first iterations are not typical of the step time."""
        share = 1.0 if self._flight.iterations_done <= 2 else _NEW_SHARE
        self._step_s += share * (report.step_time_s - self._step_s)
        self._report, self._stepped = report, time.monotonic()

    def show(self, done: int, total: int) -> None:
        """Draw a progress bar until all is done."""
        self._bar = format_bar(done, total) if done < total else ""

    def show_index(self, split: str, done: int, total: int) -> None:
        """Draw a progress bar of the indexed samples of a split, until all are indexed."""
        self.show(done, total)
        self._work = f"building the {split} index" if self._bar else ""

    def text(self) -> str:
        """Return the current text of the line."""
        phase = self._flight.phase
        if phase != self._phase:
            self._phase, self._since = phase, time.monotonic()
        since = format_duration(time.monotonic() - self._since)
        if phase in _PHASES:
            return " ".join(filter(None, (self._work or _PHASES[phase], self._bar, since)))
        step_s = time.monotonic() - self._stepped
        if self._report is None or step_s >= _LONG_STEP_S:
            which = ", the first" if self._report is None else ""
            number = f"iteration {self._flight.iteration + 1}/{self._config.train_iters}{which}"
            return f"{number}, {format_duration(step_s)} so far"
        return self._figures(self._report)

    def _figures(self, report: StepReport) -> str:
        config, iteration = self._config, report.iteration
        parts = [
            f"{format_bar(iteration, config.train_iters)} iteration {iteration}/{config.train_iters}",
            f"loss {report.lm_loss:.4f}",
            f"{report.tokens_per_second:,.0f} tokens/s",
        ]
        if report.mfu is not None:
            parts.append(f"MFU {report.mfu:.1%}")
        parts.append(f"{format_duration((config.train_iters - iteration) * self._step_s)} left")
        intervals = {"save": config.checkpoint.save_interval if config.checkpoint.save else None}
        intervals["evaluation"] = config.validation.eval_interval if config.validation.most_eval_iters else None
        for name, interval in intervals.items():
            if interval and iteration + interval - iteration % interval <= config.train_iters:
                parts.append(f"{name} in {format_duration((interval - iteration % interval) * self._step_s)}")
        return " | ".join(parts)

    def _draw(self) -> None:
        while not self._ending.wait(_REDRAW_S):
            if not self._is_terminal:
                self._sign_of_life()
                continue
            width = shutil.get_terminal_size().columns - 1
            sys.stdout.write(f"{CLEAR_LINE}{self.text()[:width]}\r")
            sys.stdout.flush()

    def _sign_of_life(self) -> None:
        text = self.text()
        if time.monotonic() - self._logged >= SIGN_OF_LIFE_S - _REDRAW_S:
            self._logged = time.monotonic()
            print_line(f" ... {text}")
