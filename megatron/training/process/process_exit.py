"""End a process that has used native threads, so that its exit status is the one it earned."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and end the process with the status that it returns, that of its ``SystemExit``, or 1 if it fails.

    What was registered with `atexit` is run and both streams are flushed, but the interpreter is not taken down: a
    thread of a communication library that releases a tensor meanwhile, or any other that comes back from native code,
    ends in ``std::terminate``. A run that has done all its work would be reported as crashed, by SIGABRT, and a refused
    one not by status 2.
    """
    try:
        status = main()
    except SystemExit as ending:
        if ending.code is not None and not isinstance(ending.code, int):
            raise
        status = ending.code or 0
    except Exception:  # noqa: BLE001 reported as the interpreter would
        sys.excepthook(*sys.exc_info())
        status = 1
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except (OSError, ValueError):  # nobody reads it any more, or the program closed it
            status = status or 1
    os._exit(status)
