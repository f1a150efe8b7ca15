"""CPU cores of a node that this process may use, and the idle ones. Importing this module imports no torch."""

from __future__ import annotations

import os
import time
from pathlib import Path

from megatron.core.available_host_memory import cgroup_folders, system_text

_WINDOW_S = 0.25
_IDLE, _IO_WAIT, _NUM_TIMES = 3, 4, 8
"""Columns of /proc/stat: the idle times, and the number of times that do not overlap."""


def count_cores(root: Path = Path("/")) -> int:
    """Return the number of cores that this process may use: the smallest of its CPU affinity and its cgroups' quotas.

    A quota of part of a core is rounded down, but to no less than one core.
    """
    cores = len(_allowed())
    for folder in cgroup_folders("cpu", root):
        words = system_text(folder / "cpu.max").split()  # version 2
        if not words:
            words = [system_text(folder / f"cpu.cfs_{name}_us").strip() for name in ("quota", "period")]
        if len(words) == 2 and words[0].isdecimal() and words[1].isdecimal() and int(words[1]):
            cores = min(cores, max(1, int(words[0]) // int(words[1])))
    return cores


def measure_idle_cores(window_s: float = _WINDOW_S, root: Path = Path("/")) -> float | None:
    """Measure how many of the cores in this process's CPU affinity are idle, during ``window_s`` seconds.

    Returns None if the system does not report it.
    """
    before = _core_times(root)
    time.sleep(window_s)
    after = _core_times(root)
    idle = 0.0
    for core, (idle_time, total) in after.items():
        if core not in before or total <= before[core][1]:
            return None
        idle += (idle_time - before[core][0]) / (total - before[core][1])
    return idle if after else None


def threads_per_process(most: int, cores: int, idle: float | None, num_processes: int) -> int:
    """Choose the CPU threads of each of ``num_processes`` processes on a node, from 1 to ``most``.

    The processes share the idle ones of the ``cores`` that they may use: a thread that has to wait for a core makes the
    other threads of its process wait in every operation. ``idle`` is None if it is unknown.
    """
    free = cores if idle is None else min(cores, idle + _NEARLY_IDLE)
    return max(1, min(most, int(free / num_processes)))


_NEARLY_IDLE = 0.25
"""Sum of the shares of cores that other processes may use without a thread less."""


def _allowed() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core_times(root: Path) -> dict[int, tuple[int, int]]:
    """Return the idle time and the total time, in clock ticks, of each core that this process may use."""
    times = {}
    for line in system_text(root / "proc/stat").splitlines():
        name, *words = line.split()
        if name.startswith("cpu") and name[3:].isdecimal() and int(name[3:]) in _allowed():
            ticks = [int(word) for word in words[:_NUM_TIMES]]
            times[int(name[3:])] = (ticks[_IDLE] + ticks[_IO_WAIT], sum(ticks))
    return times
