"""SIGTERM, the exit signal and time limits: reasons to save a checkpoint and end a run early."""

from __future__ import annotations

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from types import FrameType

from megatron.config.run_config import TrainingConfig


class ExitRequest:
    """Watch for an exit signal and the time limit of this process.

    SIGTERM is always watched, ``--exit-signal`` with ``--exit-signal-handler``. The handler only records the signal:
    the current step is finished, and then all ranks agree on the exit. A second ``--exit-signal`` has its usual effect.
    A second SIGTERM does nothing: it is normal that both the cluster's scheduler and torchrun send one.

    torchrun also sends SIGTERM when another rank has failed. Then there is no step to finish: the collective that this
    rank is in may never end, and no handler runs in it. So a thread receives the signal too, and ends the process if
    ``has_run_failed`` returns true.
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
        """Return whether ``--exit-duration-in-mins`` is over."""
        limit = self.config.exit_duration_in_mins
        return limit is not None and (time.time() - self.start_time) / 60.0 > limit

    def close(self) -> None:
        """Restore the previous signal handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_wakeup)
        self._bell.close()


_WORTH_SAYING_AGAIN = 1.5


class ExitWarning:
    """Measure how long a run may need from a signal to a complete checkpoint, and compare with what it is given.

    All ranks look for signals once an iteration. One that comes right after such a look is seen at the next, and then
    the checkpoint is saved; beside ``is_async`` saves the one under way is finished first. Without ``seconds`` nothing
    is compared.
    """

    def __init__(self, seconds: int | None, is_async: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._num_saves = 2 if is_async else 1
        self._clock = clock
        self._looked: float | None = None
        self._longest_wait = 0.0
        self._said = 0.0

    def look(self) -> None:
        """Note that the ranks look for signals now."""
        now = self._clock()
        if self._looked is not None:
            self._longest_wait = max(self._longest_wait, now - self._looked)
        self._looked = now

    def line(self, save_seconds: float | None) -> str | None:
        """Return what is to be said when a checkpoint has taken so long; each time that it is much worse."""
        if self.seconds is None or save_seconds is None:
            return None
        needed = self._longest_wait + self._num_saves * save_seconds
        if needed <= max(self.seconds, self._said * _WORTH_SAYING_AGAIN):
            return None
        self._said = needed
        under_way = ", one under way and one more" if self._num_saves > 1 else ""
        return (
            f"WARNING: from a signal to a complete checkpoint this run may need {needed:.1f} s "
            f"({self._longest_wait:.1f} s until it looks for signals, {save_seconds:.1f} s for a "
            f"checkpoint{under_way}), and --exit-warning-seconds {self.seconds} is less: it may be killed before; let "
            "the scheduler send the signal earlier"
        )
