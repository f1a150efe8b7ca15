"""Processes of a node: identity, state, termination, and the launcher that started this process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from megatron.core.console import print_line

_IMPORTED = time.time()
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_ENDED_STATES = ("Z", "X")
_PR_SET_NAME = 15
KEEPER_NAME = "rank-keeper"
"""Process name of the supervisor that restarts a rank's worker when it dies."""


@dataclass(frozen=True)
class ProcessIdentity:
    """Identity of a process on some node.

    ``machine`` is empty if the system does not reveal enough to distinguish nodes or containers. ``started`` is in
    clock ticks since the node's boot.
    """

    host: str
    machine: str
    pid: int
    started: int

    @property
    def is_alive(self) -> bool | None:
        """Return whether the process runs, or None if that cannot be determined from here."""
        # Clones of a virtual machine may share everything except the host name.
        if not self.machine or (self.machine, self.host) != (_machine(), socket.gethostname()):
            return None
        return start_time(self.pid) == self.started


def identify(pid: int) -> ProcessIdentity:
    """Identify a process of this node; if it is gone, the identity is not alive."""
    started = start_time(pid)
    return ProcessIdentity(socket.gethostname(), _machine(), pid, 0 if started is None else started)


def start_time(pid: int) -> int | None:
    """Return the start time of a process of this node in clock ticks, or None if it has ended or is unknown."""
    fields = _status(pid)
    return None if not fields or fields[0] in _ENDED_STATES else int(fields[19])


def process_start_time() -> float:
    """Return when this process started, in seconds since 1970; without ``/proc``, when this module was imported."""
    ticks = start_time(os.getpid())
    if ticks is None:
        return _IMPORTED
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))


def parent_of(pid: int) -> int:
    """Return the parent's process id, or 0 if it is unknown."""
    fields = _status(pid)
    return int(fields[1]) if fields else 0


def name_of(pid: int) -> str:
    """Return the short name of a process, or an empty string if it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().rstrip("\n")
    except OSError:
        return ""


def name_process(name: str) -> None:
    """Set the short name of this process, which process lists show."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15])


def _status(pid: int) -> list[str]:
    """Return the fields of a process's ``stat`` after its name, which may contain any character."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return []


def _machine() -> str:
    """Return an id shared by exactly those processes that can see each other."""
    try:
        return f"{_BOOT_ID.read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


_STATES = {
    "T": "stopped by a signal",
    "t": "stopped by a debugger",
    "Z": "dead",
    "X": "dead",
    "D": "waiting for a disk",
}
GONE = "gone"


@dataclass(frozen=True)
class ProcessName:
    """Unique name of a process: its node, its process id and its start time, which distinguishes it from a later one.

    ``host`` is for people; ``machine`` also distinguishes containers that do not see each other's processes.
    """

    host: str
    machine: str
    pid: int
    started: int

    @property
    def is_here(self) -> bool:
        return self.machine == _this_machine()


UNKNOWN = ProcessName("an unknown host", "", 0, 0)
"""Placeholder for a process that has not reported yet."""


def this_process() -> ProcessName:
    """Return the name of this process."""
    fields = _stat_fields(os.getpid())
    return ProcessName(socket.gethostname(), _this_machine(), os.getpid(), int(fields[19]) if fields else 0)


def state_of(name: ProcessName) -> str:
    """Describe the state of a process of this node: alive, stopped or gone; empty for a process of another node."""
    if not name.is_here:
        return ""
    fields = _stat_fields(name.pid)
    if not fields or (name.started and int(fields[19]) != name.started):
        return GONE
    return _STATES.get(fields[0], "alive")


def is_silent_for_good(state: str) -> bool:
    """Return whether a process in this state will not respond any more, unless it is resumed."""
    return state in (_STATES["T"], _STATES["Z"], GONE)


def is_at_an_end(state: str) -> bool:
    return state in (_STATES["Z"], GONE)


def kill(name: ProcessName) -> None:
    """Kill a process of this node and this user; do nothing if its id now belongs to another process."""
    if state_of(name) in ("", GONE) or name.pid == os.getpid():
        return
    try:
        if os.stat(f"/proc/{name.pid}").st_uid == os.getuid():
            os.kill(name.pid, signal.SIGKILL)
    except OSError:
        return


def bytes_moved() -> int:
    """Return the number of bytes that this process has read and written, or 0 if the system does not report it."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) for line in lines if line.startswith(("rchar", "wchar")))


def _stat_fields(pid: int) -> list[str]:
    """Return the fields after the name in ``/proc/PID/stat``: the state, ..., with the start time at index 19."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _this_machine() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return socket.gethostname()


GRACE_S = 8.0
"""Time for a process to finish the step and the checkpoint when its launcher is gone."""
_POLL_INTERVAL_S = 0.5
_PR_SET_PDEATHSIG = 1


def find_launcher(run_id: str) -> int | None:
    """Return the process that started this one with ``run_id``, or None if there is none or it is not visible.

    torchrun sets the run id in the environment of each process, but not in its own. So the launcher is the first
    ancestor, with shells in between skipped, that was started without the id.
    """
    if not run_id:
        return None
    pid = os.getppid()
    while pid > 1 and _was_started_with(pid, run_id):
        pid = parent_of(pid)
    return pid or None


def die_with_launcher(run_id: str, rank: int) -> None:
    """Make this process end soon after the torchrun that started it, however torchrun ends.

    The process gets SIGTERM at once, to which a run in training responds with a checkpoint, and SIGKILL after
    `GRACE_S`. It then also kills the launcher's other processes on this node: one that is stopped, or that holds the
    interpreter's lock, cannot end itself. A process that was started in any other way has no ``run_id``, and is not
    affected by the end of its parent.
    """
    launcher = find_launcher(run_id)
    if launcher is None:
        return
    if launcher == os.getppid():
        _ask_for_signal_at_death()
        if launcher != os.getppid():  # it ended before the request
            os.kill(os.getpid(), signal.SIGTERM)
    if _adopts_orphans(launcher):
        sys.exit("error: the launcher of this process has ended; start the run again")
    threading.Thread(target=_end_after, args=(launcher, rank), name="launcher watch", daemon=True).start()


def _end_after(launcher: int, rank: int) -> None:
    wait_for_end(launcher)
    deadline = time.monotonic() + GRACE_S
    os.kill(os.getpid(), signal.SIGTERM)
    if rank == 0:
        with contextlib.suppress(OSError):  # the launcher may have been the reader of the pipe
            print_line(
                f"WARNING: the launcher (process {launcher}) has ended: this run ends within {GRACE_S:.0f} s, if "
                "possible with a checkpoint",
                sys.stderr,
            )
    time.sleep(max(deadline - time.monotonic(), 0.0))
    for pid in _orphaned_siblings():
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)


def _orphaned_siblings() -> list[int]:
    """Return the other processes of this run on this node whose launcher has ended, too.

    Run ids need not be unique, so the processes must also have the rendezvous address of this one and its new parent.
    """
    names = (b"TORCHELASTIC_RUN_ID=", b"MASTER_ADDR=", b"MASTER_PORT=", b"WORLD_SIZE=")
    try:
        mine = {word for word in Path("/proc/self/environ").read_bytes().split(b"\0") if word.startswith(names)}
    except OSError:  # not Linux
        return []
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        try:
            theirs = set((entry / "environ").read_bytes().split(b"\0"))
            is_orphan = parent_of(int(entry.name)) == os.getppid()
        except OSError:  # it has ended, or belongs to another user
            continue
        if is_orphan and mine <= theirs:
            found.append(int(entry.name))
    return found


def wait_for_end(pid: int) -> None:
    """Wait until a process has ended."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    except (AttributeError, OSError):  # an older kernel, or not Linux
        _poll_for_end(pid)
        return
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    poll.poll()
    os.close(descriptor)


def _poll_for_end(pid: int) -> None:
    process, parent = identify(pid), os.getppid()
    while process.is_alive or (process.is_alive is None and os.getppid() == parent):
        time.sleep(_POLL_INTERVAL_S)


def _ask_for_signal_at_death() -> None:
    """Request SIGTERM when the thread that started this process ends (Linux only)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _was_started_with(pid: int, run_id: str) -> bool:
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False
    return f"TORCHELASTIC_RUN_ID={run_id}".encode() in environment.split(b"\0")


def _adopts_orphans(pid: int) -> bool:
    """Return whether a parent is the system's init, which adopts orphaned processes.

    In a container the launcher itself, a Python process, may be process 1.
    """
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        name = Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return False
    is_python = any(b"python" in word or b"torchrun" in word for word in words[:2])
    return not is_python and (pid == 1 or name == "systemd")
