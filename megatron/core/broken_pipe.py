"""Handle a broken stdout pipe, as after ``| head``."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
from collections.abc import Iterator

STATUS = 128 + signal.SIGPIPE
"""Exit status of a program that SIGPIPE has ended, as a shell shows it."""


@contextlib.contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the program without a word, as SIGPIPE does, where whoever reads standard output leaves in this block.

    Raises:
        SystemExit: the reader has gone.
    """
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if not has_lost_reader():
            raise
        sys.exit(STATUS)


def has_lost_reader() -> bool:
    """Return whether nobody reads standard output any more; what it still holds is then thrown away."""
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
