"""The machine itself: cores, memory, shared memory, limits of a process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from megatron.doctor.finding import Finding, judge

_GIB = 2**30
_MIN_MEMORY_GIB = 4.0
_MIN_SHARED_GIB = 1.0
_MIN_FILES = 4096
_CGROUP = Path("/sys/fs/cgroup")


def count_cores(cgroup: Path = _CGROUP) -> int:
    """Return the cores that this process may use: its affinity, or less where a container's quota says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = _read(cgroup / "cpu.max").split()
    if len(words) == 2 and words[0].isdecimal():
        cores = min(cores, max(1, int(words[0]) // int(words[1])))
    return cores


def examine_machine(
    local_processes: int, has_gpu: bool, cgroup: Path = _CGROUP, meminfo: Path = Path("/proc/meminfo")
) -> Iterator[Finding]:
    """Yield what the machine has for so many processes."""
    cores = count_cores(cgroup)
    installed = os.cpu_count() or cores
    text = f"{cores} of {installed} cores for {local_processes} processes"
    yield judge(
        "cores",
        cores < local_processes,
        text,
        "start fewer processes, or widen the affinity (taskset, numactl, the scheduler's cores per task)",
    )
    yield _examine_memory(cgroup, meminfo)
    yield _examine_shared_memory(Path("/dev/shm"))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = 0 <= files < _MIN_FILES
    yield judge("open files", is_low, f"{_limit(files)} for each process", "ulimit -n 65536")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = has_gpu and locked != resource.RLIM_INFINITY
    remedy = "ulimit -l unlimited: InfiniBand and pinned memory need it"
    yield judge("locked memory", is_limited, _limit(locked, " bytes"), remedy)


def _examine_memory(cgroup: Path, meminfo: Path) -> Finding:
    lines = dict(line.split(":", 1) for line in _read(meminfo).splitlines() if ":" in line)
    if "MemAvailable" not in lines:
        return Finding("skipped", "memory", "this system has no /proc/meminfo to ask")
    available = int(lines["MemAvailable"].split()[0]) * 1024
    total = int(lines["MemTotal"].split()[0]) * 1024
    text = f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f}"
    limit = _read(cgroup / "memory.max").strip()
    if limit.isdecimal():
        used = _read(cgroup / "memory.current").strip()
        available = min(available, int(limit) - (int(used) if used.isdecimal() else 0))
        text += f", the container is limited to {int(limit) / _GIB:.1f}"
    return judge("memory", available < _MIN_MEMORY_GIB * _GIB, text, "end what else runs, or take a larger machine")


def _examine_shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding("skipped", "/dev/shm", "this system has none")
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize / _GIB
    return judge(
        "/dev/shm",
        free < _MIN_SHARED_GIB,
        f"{free:.1f} GiB free",
        "give the container more: docker run --shm-size=8g or --ipc=host; NCCL connects processes through it",
    )


def _limit(value: int, unit: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}{unit}"


def _read(path: Path) -> str:
    """Return the text of a file of the system, empty where there is none."""
    try:
        return path.read_text()
    except OSError:
        return ""
