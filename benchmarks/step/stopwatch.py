"""Measure steps in one process: wall time, processor time, parts, memory; written as one JSON file a process.

Imports nothing but the standard library, so that it runs in the environment of any contestant.
"""

from __future__ import annotations

import contextlib
import json
import resource
import time
from collections.abc import Iterator
from pathlib import Path


def _processor_time() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


class Stopwatch:
    """Record every step's wall time, processor time (user + system, all threads) and the time of its parts."""

    def __init__(self) -> None:
        self._steps: list[dict[str, float]] = []
        self._parts: dict[str, float] = {}

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Measure one step."""
        self._parts = {}
        processor, start = _processor_time(), time.perf_counter()
        yield
        wall = time.perf_counter() - start
        self._steps.append({"wall_s": wall, "processor_s": _processor_time() - processor, **self._parts})

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
