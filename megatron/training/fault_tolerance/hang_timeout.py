"""Hang timeout: the limit of time without progress, which depends on the run's step times and on the phase."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from megatron.core.flight_recorder import FlightRecorder
from megatron.training.fault_tolerance.processes import bytes_moved

_DEFAULT_S = 60.0
_SILENCE_S = 20.0
_STEPS = 5.0
_SAVE_FACTOR = 1.25
_SETUP_FACTOR = 10.0
_BUSY_FACTOR = 10.0
_SETUP_PHASES = ("setup", "load")
# In these phases, a rank that computes or does I/O makes progress even without reports for a long time.
_LONG_PHASES = (*_SETUP_PHASES, "save", "evaluate", "data")
_BUSY_SHARE = 0.2
_BUSY_BYTES_PER_S = 64 * 1024


class Patience:
    """Time since a rank's last progress, and the limit for it.

    ``seconds`` is ``--hang-timeout-seconds``. The limit of a step is several times the longest step so far. During
    set-up and the first ``settling`` iterations the limit is ten times ``seconds``, and a save gets a quarter more than
    a step. A host that waits for a device may spin. So while ``device_has_work``, or an asynchronous communication is
    pending on the device, CPU time does not count as progress, and the device's progress counts instead.
    """

    def __init__(
        self,
        recorder: FlightRecorder,
        seconds: float | None,
        settling: int = 1,
        device_has_work: Callable[[], bool] = lambda: False,
    ) -> None:
        self._recorder = recorder
        self._device_has_work = device_has_work
        self._device_seen: tuple[int, int] | None = None
        self._seconds = _DEFAULT_S if seconds is None else seconds
        self._settling = settling
        self._seen_moves = -1
        self._moved = self._worked = self._looked = time.monotonic()
        self._cpu_s = time.process_time()
        self._bytes = bytes_moved()

    @property
    def silence_s(self) -> float:
        return min(_SILENCE_S, self._seconds)

    def allowance_s(self) -> float:
        """Return the limit of time without progress in the current phase."""
        recorder = self._recorder
        if recorder.phase in _SETUP_PHASES or recorder.iterations_done < self._settling:
            return _SETUP_FACTOR * self._seconds
        step_s = max(self._seconds, _STEPS * recorder.longest_step_s)
        return _SAVE_FACTOR * step_s if recorder.phase == "save" else step_s

    def idle_s(self) -> float:
        """Return the time since the last progress; this must be called regularly."""
        now, moves = time.monotonic(), self._recorder.moves
        if moves != self._seen_moves:
            self._seen_moves = moves
            self._moved = self._worked = now
        elif self._is_busy(now) and now - self._moved < _BUSY_FACTOR * self.allowance_s():
            self._worked = now
        self._looked = now
        return now - self._worked

    def start_again(self) -> None:
        """Restart the idle timer after this process was suspended."""
        self._moved = self._worked = self._looked = time.monotonic()

    def _is_busy(self, now: float) -> bool:
        cpu_s, moved, elapsed = time.process_time(), 0, now - self._looked
        is_long = self._recorder.phase in _LONG_PHASES or self._recorder.iterations_done < self._settling
        if is_long:
            moved = bytes_moved()
        was_cpu, was_moved = self._cpu_s, self._bytes
        self._cpu_s, self._bytes = cpu_s, moved or was_moved
        if not is_long or elapsed <= 0:
            return False
        return (
            self._bytes - was_moved > _BUSY_BYTES_PER_S * elapsed
            or self._device_moves(cpu_s - was_cpu > _BUSY_SHARE * elapsed)
            or _waits_for_disk()
        )

    def _device_moves(self, is_computing: bool) -> bool:
        """Return whether the device has made progress or, if the device has no work, whether the host is computing."""
        try:
            view = self._recorder.on_device()
        except RuntimeError:  # The device has failed, so no rank waits for it any more.
            return is_computing
        if view is None:
            return is_computing
        seen, self._device_seen = self._device_seen, (sum(view.entered.values()), len(view.inside) + len(view.beside))
        has_work = view.ahead is not None or self._device_seen[1] > 0 or self._device_has_work()
        return self._device_seen != seen if has_work else is_computing


def _waits_for_disk() -> bool:
    """Return whether a thread of this process is blocked on disk I/O."""
    for task in Path("/proc/self/task").glob("[0-9]*"):
        try:
            text = (task / "stat").read_text()
        except OSError:
            continue
        if text.rpartition(")")[2].split()[:1] == ["D"]:
            return True
    return False
