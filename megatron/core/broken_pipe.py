"""Handle a broken stdout pipe, as after ``| head``."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator

STATUS = 128 + signal.SIGPIPE
"""Exit status that a shell reports for a program ended by SIGPIPE."""


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """Exit silently, as SIGPIPE does, if the reader of stdout closes the pipe inside this context.

    Raises:
        SystemExit: the reader closed the pipe.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if not has_lost_reader():
            raise
        sys.exit(STATUS)


def has_lost_reader() -> bool:
    """Return whether the reader of stdout closed the pipe; if so, discard all further output."""
    try:
        descriptor = sys.stdout.fileno()
    except (OSError, ValueError):
        return False
    poll = select.poll()
    poll.register(descriptor, 0)
    if not poll.poll(0):
        return False
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
    return True
