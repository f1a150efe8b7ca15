"""Available host memory of a node, limited by cgroups. Importing this module imports no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath


@dataclass(frozen=True)
class HostRoom:
    """Host memory of a node that is still available, and the number of processes of the run that share it."""

    available: int
    num_processes: int


@dataclass(frozen=True)
class MachineMemory:
    """Host memory of a node, in bytes.

    ``limit`` is the smallest limit of the cgroups that contain this process, or None if they set no limit.
    """

    installed: int
    available: int
    limit: int | None


def machine_memory(root: Path = Path("/")) -> MachineMemory | None:
    """Read the node's memory from /proc/meminfo; return None if it is not available there.

    If cgroups (version 1 or 2) limit this process, ``available`` is at most the memory left in each of them. Inactive
    page cache counts as available.
    """
    figures = _figures(root / "proc/meminfo")
    if "MemAvailable:" not in figures:
        return None
    installed = figures["MemTotal:"] * 1024
    limits = [each for folder in cgroup_folders("memory", root) for each in _limits(folder)]
    available = max(0, min([figures["MemAvailable:"] * 1024, *(left for _, left in limits)]))
    # Version 1 writes a number near 2**63 for a group without a limit.
    granted = [limit for limit, _ in limits if limit < installed]
    return MachineMemory(installed, available, min(granted, default=None))


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the available host memory from `machine_memory`, or None if it is unknown."""
    memory = machine_memory(root)
    return None if memory is None else memory.available


def cgroup_folders(controller: str, root: Path = Path("/")) -> Iterator[Path]:
    """Yield the visible folders of the cgroups (version 1 or 2) of this process, each followed by its parents.

    ``controller`` is the cgroup controller whose limits are of interest, such as ``memory`` or ``cpu``.
    """
    for line in system_text(root / "proc/self/cgroup").splitlines():
        _, controllers, name = line.split(":", 2)
        if controllers == "" or controller in controllers.split(","):
            top = root / "sys/fs/cgroup" / (controller if controllers else "")
            group = PurePosixPath(name)
            yield from (top / str(each).lstrip("/") for each in (group, *group.parents))


def _limits(group: Path) -> Iterator[tuple[int, int]]:
    """Yield a cgroup's memory limit and the memory left below it, if the cgroup limits memory."""
    for limit_name, used_name, cached_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = system_text(group / limit_name).strip(), system_text(group / used_name).strip()
        if limit.isdecimal() and used.isdecimal():
            yield int(limit), int(limit) - int(used) + _figures(group / "memory.stat").get(cached_name, 0)


def _figures(path: Path) -> dict[str, int]:
    """Parse a system file of ``name number`` lines into a dictionary."""
    lines = (line.split() for line in system_text(path).splitlines())
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdecimal()}


def system_text(path: Path) -> str:
    """Return the text of a system file, or an empty string if the file cannot be read."""
    try:
        return path.read_text()
    except OSError:
        return ""
