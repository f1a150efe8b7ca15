"""The TCP connections of another process, which are ended as a switch that fails ends them.

Nothing of the network is changed: the system lends this process the other's sockets (Linux 5.6 or newer, and the same
rights as a debugger's), and both ends of each connection learn that it is over.
"""

from __future__ import annotations

import ctypes
import errno
import os
import socket
from pathlib import Path

from megatron.core.errors import ConfigurationError

_PIDFD_GETFD = 438


def drop_connections(pid: int) -> int:
    """End every established TCP connection of a process and return how many there were.

    Raises:
        ConfigurationError: this system does not let one process do that to another.
    """
    process = os.pidfd_open(pid)
    try:
        return sum(_shut_down(process, int(path.name)) for path in _sockets(pid))
    finally:
        os.close(process)


def _sockets(pid: int) -> list[Path]:
    found = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        try:
            if os.readlink(path).startswith("socket:"):
                found.append(path)
        except FileNotFoundError:
            continue
    return found


def _shut_down(process: int, descriptor: int) -> bool:
    library = ctypes.CDLL(None, use_errno=True)
    borrowed: int = library.syscall(_PIDFD_GETFD, process, descriptor, 0)
    if borrowed < 0:
        if ctypes.get_errno() in (errno.EBADF, errno.ESRCH):  # the process has closed it, or has ended, meanwhile
            return False
        reason = os.strerror(ctypes.get_errno())
        raise ConfigurationError(
            f"--partition: this system does not lend a process's sockets ({reason}); in a container give it "
            "CAP_SYS_PTRACE, or leave --partition out"
        )
    with socket.socket(fileno=borrowed) as connection:
        if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
            return False
        try:
            connection.getpeername()
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:  # it listens, or is over
            return False
        return True
