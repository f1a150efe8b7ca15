"""Measure steps in one process: wall time, processor time, parts, memory; written as one JSON file a process.

Imports nothing but the standard library, so that it runs in the environment of any contestant.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path


def _processor_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _busy_time() -> float:
    """Return the seconds that all processors of the machine together have worked; 0 where Linux does not tell."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    user, nice, system, _, _, interrupts, soft_interrupts, stolen = map(int, stat.read_text().split()[1:9])
    return (user + nice + system + interrupts + soft_interrupts + stolen) / os.sysconf("SC_CLK_TCK")


class Stopwatch:
    """Record every step's wall time, processor time (user + system, all threads) and the time of its parts.

    The time for which the whole machine was busy is recorded too: what exceeds the contestant's own is other work.
    """

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []
        self._parts: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step."""
        self._parts = {}
        busy, processor, start = _busy_time(), _processor_time(), time.perf_counter()
        yield
        measured = {
            "wall_s": time.perf_counter() - start,
            "processor_s": _processor_time() - processor,
            "machine_busy_s": _busy_time() - busy,
        }
        self._steps.append({**measured, **self._parts})

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add what runs inside to a part of the current step."""
        start = time.perf_counter()
        yield
        self.add(name, time.perf_counter() - start)

    def add(self, name: str, elapsed_s: float) -> None:
        """Add seconds to a part of the current step."""
        key = f"{name}_s"
        self._parts[key] = self._parts.get(key, 0.0) + elapsed_s

    def write(self, path: Path, num_warmup: int, losses: list[float], versions: dict[str, str]) -> None:
        """Write the steps after the warm-up, the process's peak memory and all losses."""
        result = {
            "steps": self._steps[num_warmup:],
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            "losses": losses,
            "versions": versions,
        }
        path.write_text(json.dumps(result))
