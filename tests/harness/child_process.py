"""Processes that tests start end with the process of the tests, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def ends_with_parent() -> Callable[[], None]:
    """Return a ``preexec_fn`` that has the system kill the new process when the thread that starts it ends (Linux).

    A launcher in a session of its own otherwise trains on for hours if the tests are killed. The ranks end with it.
    """
    parent = os.getpid()

    def ask() -> None:
        if _LIBC is not None:
            _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:
                os._exit(1)

    return ask
