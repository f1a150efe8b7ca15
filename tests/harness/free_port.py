"""A port that nobody uses, for ranks that meet."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LOWEST, _LOWEST_OF_CONNECTIONS = 10_000, 32_768


def free_port() -> int:
    """Return a port of this machine that is free, and not among those that connections are given by themselves.

    Between this call and its use, ranks of other tests make many connections, which must not take it.
    """
    end = int(_RANGE.read_text().split()[0]) if _RANGE.exists() else _LOWEST_OF_CONNECTIONS
    ports = random.SystemRandom().sample(range(_LOWEST, max(end, _LOWEST + 1000)), 100)
    for port in ports:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError(f"none of 100 ports from {_LOWEST} to {end} is free")
