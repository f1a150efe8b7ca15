"""Available host memory of a node, limited by cgroups. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class HostRoom:
    """Hold the bytes that can still be had on a machine, and how many processes of a run share them."""

    available: int
    num_processes: int


@dataclass(frozen=True)
class MachineMemory:
    """Hold what a machine has, in bytes.

    ``limit`` is the least that a control group around this process grants, None where none does.
    """

    installed: int
    available: int
    limit: int | None


def machine_memory(root: Path = Path("/")) -> MachineMemory | None:
    """Return what Linux says of its memory, or None where it says nothing.

    Where control groups limit this process (version 1 or 2, its own group and those around it), available is no more
    than each of them has left, its cached files counted as left.
    """
    figures = _figures(root / "proc/meminfo")
    if "MemAvailable:" not in figures:
        return None
    installed = figures["MemTotal:"] * 1024
    limits = [each for folder in _groups(root) for each in _limits(folder)]
    available = max(0, min([figures["MemAvailable:"] * 1024, *(left for _, left in limits)]))
    # Version 1 writes a number near 2**63 for a group without a limit.
    granted = [limit for limit, _ in limits if limit < installed]
    return MachineMemory(installed, available, min(granted, default=None))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return what `machine_memory` says can still be had, or None where Linux says nothing."""
    memory = machine_memory(root)
    return None if memory is None else memory.available


def _groups(root: Path) -> Iterator[Path]:
    """Yield the folders of the control groups that this process is in, as far as they are seen from here."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "" or "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
            group = PurePosixPath(name)
            yield from (top / str(each).lstrip("/") for each in (group, *group.parents))


def _limits(group: Path) -> Iterator[tuple[int, int]]:
    """Yield the limit of a control group and what is left of it, if it limits memory."""
    for limit_name, used_name, cached_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = _text(group / limit_name).strip(), _text(group / used_name).strip()
        if limit.isdecimal() and used.isdecimal():
            yield int(limit), int(limit) - int(used) + _figures(group / "memory.stat").get(cached_name, 0)


def _figures(path: Path) -> dict[str, int]:
    """Return the numbers of a file of the system by the words before them."""
    lines = (line.split() for line in _text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def _text(path: Path) -> str:
    """Return the text of a file of the system, empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
