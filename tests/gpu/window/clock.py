"""Times of work on the device by events, and of the host by its clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_REPEATS = 10
_WARMUP = 2
_FLUSH_BYTES = 256 * 2**20
"""More than the L2 cache of any of the GPUs."""
_WAIT_CYCLES = 4_000_000
"""About 2 ms: a compiled function or an autograd function takes the host longer than the writes take the device."""


class KernelClock:
    """Time work on the device between two events. The L2 cache is emptied before each time by writing other memory.

    The writes, and a wait after them, keep the device busy while the host launches, so that launches are not measured.
    """

    def __init__(self, device: torch.device, *, small: bool) -> None:
        self._other = torch.empty(1024 if small else _FLUSH_BYTES, dtype=torch.uint8, device=device)
        self._repeats = 2 if small else _REPEATS
        self._waits = not small

    @property
    def num_calls(self) -> int:
        """Return how often `milliseconds` calls the work."""
        return _WARMUP + self._repeats

    def milliseconds(self, work: Callable[[], object]) -> float:
        """Return the median time of some work, after some times that do not count."""
        for _ in range(_WARMUP):
            work()
        pairs = []
        for _ in range(self._repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            self._other.zero_()
            if self._waits:
                torch.cuda._sleep(_WAIT_CYCLES)  # type: ignore[no-untyped-call]
            start.record()
            work()
            end.record()
            pairs.append((start, end))
        torch.cuda.synchronize()
        return statistics.median(float(start.elapsed_time(end)) for start, end in pairs)


def host_microseconds(work: Callable[[], object], count: int) -> float:
    """Return the host's time per call of some work that only launches, the shortest of some rounds."""
    for _ in range(min(count, 10)):
        work()
    times = []
    for _ in range(5):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        for _ in range(count):
            work()
        times.append((time.perf_counter() - begun) / count)
    torch.cuda.synchronize()
    return 1e6 * min(times)
