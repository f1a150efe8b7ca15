"""Report the progress and rate of copying a checkpoint's bytes, as log lines or as a bar on a terminal."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.core.console import ProgressBar

_GIGABYTE = 1e9
_INTERVAL_S = 2.0


class ByteProgress:
    """Progress of bytes, logged at most every two seconds (on a terminal drawn as a bar) and once at the end.

    A tensor that several ranks hold may be counted more than once, but the percentage never exceeds 100 %.
    """

    def __init__(
        self, verb: str, total_bytes: int, log: Callable[[str], None], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._verb = verb
        self._total_bytes = total_bytes
        self._log = log
        self._clock = clock
        self._bar = ProgressBar()
        self._num_bytes = 0
        self._start_time = self._last_time = clock()

    def add(self, num_bytes: int) -> None:
        """Add completed bytes."""
        self._num_bytes += num_bytes
        if self._bar.is_on:
            self._bar.show(self._verb, self._num_bytes, self._total_bytes, f"at {self._rate}")
        elif self._clock() - self._last_time >= _INTERVAL_S:
            self._last_time = self._clock()
            share = min(self._num_bytes / max(self._total_bytes, 1), 1.0)
            self._log(f"  {self._verb}: {share:4.0%} of {self._total_bytes / _GIGABYTE:.2f} GB at {self._rate}")

    def finish(self) -> None:
        """Log the total."""
        elapsed_s = self._clock() - self._start_time
        self._bar.clear()
        self._log(f"  {self._verb}: {self._num_bytes / _GIGABYTE:.2f} GB in {elapsed_s:.1f} s at {self._rate}")

    @property
    def _rate(self) -> str:
        elapsed_s = max(self._clock() - self._start_time, 1e-6)
        return f"{self._num_bytes / elapsed_s / 1e6:.0f} MB/s"
