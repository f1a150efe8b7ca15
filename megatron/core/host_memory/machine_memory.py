"""How much of the machine's memory can still be had."""

from __future__ import annotations

import os

_MACHINE_MEMORY = "/proc/meminfo"
_CONTAINER = "/sys/fs/cgroup"


def available_bytes() -> int | None:
    """Return what Linux says can still be had, within the container's limit where there is one; else None."""
    if not os.path.exists(_MACHINE_MEMORY):
        return None
    with open(_MACHINE_MEMORY) as meminfo:
        figures = dict(line.split(":", 1) for line in meminfo if ":" in line)
    if "MemAvailable" not in figures:
        return None
    available = int(figures["MemAvailable"].split()[0]) * 1024
    limit, used = (_whole_number(f"{_CONTAINER}/memory.{name}") for name in ("max", "current"))
    return available if limit is None else min(available, limit - (used or 0))


def _whole_number(path: str) -> int | None:
    if not os.path.exists(path):
        return None
    with open(path) as file:
        text = file.read().strip()
    return int(text) if text.isdecimal() else None
