"""The machine itself: cores, memory, shared memory, limits of a process."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

from megatron.core.available_host_memory import machine_memory
from megatron.doctor.finding import Finding, judge

_GIB = 2**30
_MIN_MEMORY_GIB = 4.0
_MIN_SHARED_GIB = 1.0
_MIN_FILES = 4096
_CORES_OF_CGROUP = "sys/fs/cgroup/cpu.max"


def count_cores(root: Path = Path("/")) -> int:
    """Return the cores that this process may use: its affinity, or less where a container's quota says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    words = _read(root / _CORES_OF_CGROUP).split()
    if len(words) == 2 and words[0].isdecimal():
        cores = min(cores, max(1, int(words[0]) // int(words[1])))
    return cores


def examine_machine(local_processes: int, has_gpu: bool, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield what the machine has for so many processes."""
    cores = count_cores(root)
    installed = os.cpu_count() or cores
    text = f"{cores} of {installed} cores for {local_processes} processes"
    yield judge(
        "cores",
        cores < local_processes,
        text,
        "start fewer processes, or widen the affinity (taskset, numactl, the scheduler's cores per task)",
    )
    yield _examine_memory(root)
    yield _examine_shared_memory(Path("/dev/shm"))
    files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_low = 0 <= files < _MIN_FILES
    yield judge("open files", is_low, f"{_limit(files)} for each process", "ulimit -n 65536")
    locked, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    is_limited = has_gpu and locked != resource.RLIM_INFINITY
    remedy = "ulimit -l unlimited: InfiniBand and pinned memory need it"
    yield judge("locked memory", is_limited, _limit(locked, " bytes"), remedy)


def _examine_memory(root: Path) -> Finding:
    memory = machine_memory(root)
    if memory is None:
        return Finding("skipped", "memory", "this system has no /proc/meminfo to ask")
    text = f"{memory.available / _GIB:.1f} GiB available of {memory.installed / _GIB:.1f}"
    if memory.limit is not None:
        text += f", the container is limited to {memory.limit / _GIB:.1f}"
    is_short = memory.available < _MIN_MEMORY_GIB * _GIB
    return judge("memory", is_short, text, "end what else runs, or take a larger machine")


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
