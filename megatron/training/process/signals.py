"""Reasons to end a run early: a signal from the scheduler, a time limit, an iteration."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from megatron.training.config.training_config import TrainingConfig


class ExitRequest:
    """Watch for an exit signal and the time limit of this process.

    SIGTERM is always watched, ``--exit-signal`` with ``--exit-signal-handler``. The handler only notes the signal: the
    step that runs is finished, and all ranks agree on the exit after it. A second signal of the same kind does what it
    would have done without this watch; a second SIGTERM does nothing, since a scheduler that signals every process of
    a job and torchrun, which passes its own on, send two as a matter of course.

    torchrun also sends SIGTERM when another rank has failed, and there is no step to finish then: the collective that
    this rank stands in may never end, and no handler runs in it. So a thread hears the signal too, and ends the process
    where ``has_run_failed`` says so.
    """

    def __init__(
        self, config: TrainingConfig, start_time: float, has_run_failed: Callable[[], bool] = lambda: False
    ) -> None:
        self.config = config
        self.start_time = start_time
        self.signal_received = False
        watched = {signal.SIGTERM}
        if config.exit_signal_handler:
            watched.add(signal.Signals[config.exit_signal])
        self._ear, self._bell = socket.socketpair()
        self._bell.setblocking(False)
        threading.Thread(target=self._listen, args=(has_run_failed,), name="signal listener", daemon=True).start()
        self._previous_wakeup = signal.set_wakeup_fd(self._bell.fileno(), warn_on_full_buffer=False)
        self._previous = {number: signal.signal(number, self._note) for number in watched}

    def _listen(self, has_run_failed: Callable[[], bool]) -> None:
        while number := self._ear.recv(1):
            if number[0] == signal.SIGTERM and has_run_failed():
                os._exit(1)
        self._ear.close()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.signal_received = True
        if number != signal.SIGTERM:
            signal.signal(number, self._previous[signal.Signals(number)])

    @property
    def time_is_up(self) -> bool:
        """Return whether the run has lasted as long as it may."""
        limit = self.config.exit_duration_in_mins
        return limit is not None and (time.time() - self.start_time) / 60.0 > limit

    def close(self) -> None:
        """Put the previous signal handlers back."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._bell.close()
