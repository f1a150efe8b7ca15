"""Exit status: end a process that has used native threads with the status that its program returned."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable
from typing import NoReturn


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and end the process with the status that it returns, that of its ``SystemExit``, or 1 if it fails.

    The functions registered with `atexit` are run and both streams are flushed, but the interpreter is not finalized.
    During finalization a thread that returns from native code, such as one of a communication library that releases a
    tensor, ends in ``std::terminate``: a finished run would be reported as crashed (SIGABRT), and a refused one would
    not exit with status 2.
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
        except (OSError, ValueError):  # its reader is gone, or the program closed it
            status = status or 1
    os._exit(status)
