"""Checks of a node: cores, memory, process limits, host names, ports and file systems."""

from __future__ import annotations

import errno
import mmap
import os
import resource
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from megatron.core.available_cores import count_cores
from megatron.core.available_host_memory import machine_memory

Status = Literal["ok", "warning", "wrong", "skipped"]
"""``wrong`` makes a run fail or compute wrong results; a ``warning`` costs speed or is a risk."""


@dataclass(frozen=True)
class Finding:
    """Result of a check of one subject, with a suggested fix."""

    status: Status
    subject: str
    text: str
    remedy: str = ""

    def describe(self) -> str:
        """Format the finding as one line."""
        return f"{self.status:8}{self.subject}: {self.text}" + (f"; {self.remedy}" if self.remedy else "")


def judge(subject: str, problem: bool, text: str, remedy: str, status: Status = "warning") -> Finding:
    """Return a finding with ``status`` and the remedy if there is a problem, otherwise an ok finding."""
    return Finding(status, subject, text, remedy) if problem else Finding("ok", subject, text)


def to_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Convert findings, and their number per status, to JSON values."""
    counts = {
        status: sum(each.status == status for each in findings) for status in ("wrong", "warning", "ok", "skipped")
    }
    return {"counts": counts, "findings": [asdict(finding) for finding in findings]}


_GIB = 2**30
_MIN_MEMORY_GIB = 4.0
_MIN_SHARED_GIB = 1.0
_MIN_FILES = 4096


def examine_machine(local_processes: int, has_gpu: bool, root: Path = Path("/")) -> Iterator[Finding]:
    """Yield findings on the node's cores, memory and limits for ``local_processes`` processes."""
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
        return Finding("skipped", "memory", "this system has no /proc/meminfo")
    text = f"{memory.available / _GIB:.1f} of {memory.installed / _GIB:.1f} GiB are available"
    if memory.limit is not None:
        text += f", the container is limited to {memory.limit / _GIB:.1f} GiB"
    is_short = memory.available < _MIN_MEMORY_GIB * _GIB
    return judge("memory", is_short, text, "stop other processes, or use a node with more memory")


def _examine_shared_memory(folder: Path) -> Finding:
    if not folder.is_dir():
        return Finding("skipped", "/dev/shm", "this system has none")
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize / _GIB
    return judge(
        "/dev/shm",
        free < _MIN_SHARED_GIB,
        f"{free:.1f} GiB free",
        "increase the container's shared memory: docker run --shm-size=8g or --ipc=host; NCCL connects processes "
        "through it",
    )


def _limit(value: int, unit: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value:,}{unit}"


_DEFAULT_PORT = "29500"


def interface_names() -> list[str]:
    """Return the names of this node's network interfaces."""
    return [name for _, name in socket.if_nameindex()]


def examine_network(
    environment: Mapping[str, str], interfaces: Collection[str], is_launched: bool
) -> Iterator[Finding]:
    """Yield findings on host names, selected interfaces and, if ``is_launched`` is false, the port."""
    yield _examine_name("host name", socket.gethostname(), "add it to /etc/hosts")
    address = environment.get("MASTER_ADDR")
    if address is not None:
        yield _examine_name("MASTER_ADDR", address, "set it to the name or address of the first node")
    for variable, find in (("NCCL_SOCKET_IFNAME", nccl_interfaces), ("GLOO_SOCKET_IFNAME", gloo_interfaces)):
        if variable in environment:
            chosen = find(environment[variable], interfaces)
            text = f"{environment[variable]} " + (f"is {', '.join(chosen)}" if chosen else "fits no interface")
            yield judge(variable, not chosen, text, f"this node has {', '.join(sorted(interfaces))}", "wrong")
    if is_launched:
        yield Finding("skipped", "port", "the launcher uses it")
        return
    yield _examine_port(environment.get("MASTER_PORT", _DEFAULT_PORT))


def nccl_interfaces(value: str, interfaces: Collection[str]) -> list[str]:
    """Return the interfaces that NCCL_SOCKET_IFNAME selects: by prefix, with ``=`` by name, with ``^`` all others."""
    is_excluding, text = value.startswith("^"), value.removeprefix("^")
    is_exact, text = text.startswith("="), text.removeprefix("=")
    names = [name for name in text.split(",") if name]
    fits = [any(each == name if is_exact else each.startswith(name) for name in names) for each in interfaces]
    return [each for each, is_named in zip(interfaces, fits) if is_named != is_excluding]


def gloo_interfaces(value: str, interfaces: Collection[str]) -> list[str]:
    """Return the interfaces that GLOO_SOCKET_IFNAME selects, or none if one of its names does not exist."""
    names = value.split(",")
    return names if all(name in interfaces for name in names) else []


def _examine_name(subject: str, name: str, remedy: str) -> Finding:
    try:
        found = socket.getaddrinfo(name, None)
    except OSError as error:
        return Finding("wrong", subject, f"{name} does not resolve ({error})", remedy)
    addresses = sorted({str(entry[4][0]) for entry in found})
    return Finding("ok", subject, f"{name} is {', '.join(addresses)}")


def _examine_port(text: str) -> Finding:
    if not text.isdecimal() or not 0 < int(text) < 65536:
        return Finding("wrong", "port", f"MASTER_PORT is {text!r}", "use a number from 1 to 65535")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(("", int(text)))
        except OSError as error:
            remedy = "stop the process that uses it, or pass a different --master-port to torchrun"
            return Finding("wrong", "port", f"{text} cannot be used ({error.strerror})", remedy)
    return Finding("ok", "port", f"{text} is free")


_MIB = 2**20
PROBE_BYTES = 64 * _MIB
_MIN_FREE_GIB = 20.0
_MIN_WRITE_MIB_S = 100.0
_KINDS = {
    "tmpfs": "it is in memory, and is empty after a restart",
    "ramfs": "it is in memory, and is empty after a restart",
    "overlay": "it is in the container's own layer, and is lost with the container",
}


def examine_save(folder: Path, mounts: str) -> Iterator[Finding]:
    """Yield findings on the folder of ``--save``, using temporary files."""
    subject = f"--save {folder}"
    try:
        place = _existing(folder)
    except OSError as error:
        text = f"cannot be created: {error.strerror}: {error.filename}"
        yield Finding("wrong", subject, text, "change --save, or the permissions of its parent folders")
        return
    kind = file_system_of(place, mounts)
    yield judge(subject, kind in _KINDS, f"on {kind}" + _reason(kind), "save to persistent storage")
    free = shutil.disk_usage(place).free
    yield judge(
        subject,
        free < _MIN_FREE_GIB * _GIB,
        f"{free / _GIB:.1f} GiB free",
        "free some space: a checkpoint takes 14 to 18 bytes per parameter, and both checkpoints exist while one is "
        "replaced",
    )
    try:
        yield from _probe(place, subject)
    except OSError as error:
        yield Finding(
            "wrong", subject, f"cannot be written: {error}", "change --save, or the permissions of the folder"
        )


def examine_data(prefix: str, mounts: str) -> Iterator[Finding]:
    """Yield a finding on whether the token files of a ``--data-path`` prefix can be memory-mapped."""
    subject = f"--data-path {prefix}"
    paths = [Path(prefix + suffix) for suffix in (".bin", ".idx")]
    remedy = "pass the prefix of the two files that tools/preprocess_data.py writes"
    try:
        missing = [path.name for path in paths if not path.is_file()]
        empty = [path.name for path in paths if path.name not in missing and not path.stat().st_size]
    except OSError as error:
        yield Finding("wrong", subject, f"cannot be checked: {error.strerror}", remedy)
        return
    if missing or empty:
        texts = [(missing, f"not found in {paths[0].parent}"), (empty, "without content")]
        text = "; ".join(f"{' and '.join(names)} {problem}" for names, problem in texts if names)
        yield Finding("wrong", subject, text, remedy)
        return
    try:
        for path in paths:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                content[-1]
    except (OSError, ValueError) as error:
        yield Finding("wrong", subject, f"cannot be mapped: {error}", "copy the data to a different file system")
        return
    size = sum(path.stat().st_size for path in paths)
    yield Finding("ok", subject, f"{size / _GIB:.2f} GiB on {file_system_of(paths[0], mounts)}, can be mapped")


def file_system_of(path: Path, mounts: str) -> str:
    """Return the file system type of a path, from the text of ``/proc/mounts``."""
    target = str(path.resolve())
    kind, longest = "an unknown file system", -1
    for line in mounts.splitlines():
        _, point, name, *_ = line.split()
        # The kernel writes a space in a name as the octal escape \040.
        point = point.replace("\\040", " ")
        if len(point) >= longest and (target == point or target.startswith(point.rstrip("/") + "/")):
            kind, longest = name, len(point)
    return kind


def _reason(kind: str) -> str:
    return f": {_KINDS[kind]}" if kind in _KINDS else ""


def _existing(folder: Path) -> Path:
    """Return the folder or its nearest existing parent.

    Raises:
        OSError: a component of the path is a file or a broken link, or cannot be examined.
    """
    for place in (folder.absolute(), *folder.absolute().parents):
        try:
            is_folder = stat.S_ISDIR(place.stat().st_mode)
        except (FileNotFoundError, NotADirectoryError):
            if place.is_symlink():
                raise FileNotFoundError(errno.ENOENT, "a link to a missing folder", str(place)) from None
            continue
        if not is_folder:
            raise NotADirectoryError(errno.ENOTDIR, "not a folder", str(place))
        return place.resolve()
    raise AssertionError("the root exists")


def _probe(place: Path, subject: str) -> Iterator[Finding]:
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=place) as name:
        written, published = Path(name) / "written", Path(name) / "published"
        block = os.urandom(_MIB)
        start = time.perf_counter()
        with written.open("wb") as file:
            for _ in range(PROBE_BYTES // _MIB):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        speed = PROBE_BYTES / _MIB / (time.perf_counter() - start)
        text = f"writes {speed:.0f} MiB/s with fsync, {PROBE_BYTES // _MIB} MiB"
        yield judge(subject, speed < _MIN_WRITE_MIB_S, text, "saving will wait for it: use a faster disk")
        published.write_bytes(b"old")
        os.replace(written, published)
        is_whole = not written.exists() and published.stat().st_size == PROBE_BYTES
        text = "a rename replaces a file" if is_whole else "a rename did not replace a file"
        yield judge(subject, not is_whole, text, "checkpoints are published by renaming: use a different disk", "wrong")
        with published.open("rb") as read, mmap.mmap(read.fileno(), 0, access=mmap.ACCESS_READ) as content:
            is_same = content[:_MIB] == block
        text = "a file can be mapped" if is_same else "a mapped file differs from the written data"
        yield judge(subject, not is_same, text, "checkpoints are read by mapping: use a different disk", "wrong")
