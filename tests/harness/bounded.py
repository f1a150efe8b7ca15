"""Try many cases in forked processes of bounded memory and time, and say which of them end a process or outlast it.

One process takes case after case. Where one ends it or outlasts the limit, another goes on with the next case.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

EXTRA_BYTES = 1 << 30
SECONDS_A_CASE = 5.0
_SECONDS_ASLEEP = 60.0
_LOOK_S = 1.0
_BYTES_KEPT = 4000


@dataclass(frozen=True)
class BadCase:
    """Say what a case did that none may do."""

    number: int
    what: str


def bad_cases(attempt: Callable[[int], None], count: int, *, first: int = 0, worst: int = 20) -> list[BadCase]:
    """Return the cases that raise, end their process, compute for five seconds or need 1 GiB more than it has.

    ``attempt`` gets the number of a case, and returns where the case was answered as it should be. No more than
    ``worst`` are looked for.
    """
    found: list[BadCase] = []
    while first < count and len(found) < worst:
        bad = _first_bad_case(attempt, first, count)
        if bad is None:
            break
        found.append(bad)
        first = bad.number + 1
    return found


def _first_bad_case(attempt: Callable[[int], None], first: int, count: int) -> BadCase | None:
    """Run the cases in a process of their own up to the first bad one."""
    readable, writable = os.pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        _run_cases(attempt, first, count, writable)
    os.close(writable)
    number, rest = first, b""
    begun, since = 0.0, time.monotonic()
    try:
        while True:
            if not select.select([readable], [], [], _LOOK_S)[0]:
                if _cpu_seconds(pid) - begun > SECONDS_A_CASE or time.monotonic() - since > _SECONDS_ASLEEP:
                    return BadCase(number, f"took {SECONDS_A_CASE:g} s of computing, or {_SECONDS_ASLEEP:g} s")
                continue
            read = os.read(readable, 1 << 16)
            rest += read
            if not read:
                break
            message = rest.lstrip(b"\n")  # of the first bad case; those before it are an end of line each
            number, rest = number + len(rest) - len(message), message
            begun, since = _cpu_seconds(pid), time.monotonic()
        if rest:
            return BadCase(number, rest.decode(errors="replace").removeprefix("error "))
    finally:
        os.close(readable)
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if number < count:
        return BadCase(number, f"ended the process (status {os.waitstatus_to_exitcode(status)})")
    return None


def _cpu_seconds(pid: int) -> float:
    """Return how long a process has computed: on a busy machine that is less than has passed."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _run_cases(attempt: Callable[[int], None], first: int, count: int, writable: int) -> None:
    """Run cases in the forked process: write a line for each that is done, and what is wrong with the first bad one."""
    limit = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + EXTRA_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    try:
        for number in range(first, count):
            attempt(number)
            os.write(writable, b"\n")
    except BaseException:  # noqa: BLE001 - the parent reports it
        os.write(writable, b"error ")
        os.write(writable, traceback.format_exc().encode(errors="replace")[-_BYTES_KEPT:])
    finally:
        os._exit(0)
