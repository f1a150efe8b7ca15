"""SIGTERM, the exit signal and time limits: reasons to save a checkpoint and end a run early."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from megatron.config import TrainingConfig


class ExitRequest:
    """Watches for an exit signal and for the time limit of this process.

    SIGTERM is always watched, and ``--exit-signal`` with ``--exit-signal-handler``. The handler only records the
    signal: the current step finishes, and then all ranks agree on the exit. A second ``--exit-signal`` has its usual
    effect. A second SIGTERM has no effect, because both the cluster's scheduler and torchrun normally send one.

    torchrun also sends SIGTERM when another rank has failed. Then the current step cannot finish: this rank's
    collective may never end, and in gloo and NCCL Python runs no signal handler during it. So a thread is also notified
    of the signal, and it ends the process if ``has_run_failed`` returns true.
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
        """Return whether ``--exit-duration-in-mins`` has elapsed."""
        limit = self.config.exit_duration_in_mins
        return limit is not None and (time.time() - self.start_time) / 60.0 > limit

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._bell.close()
