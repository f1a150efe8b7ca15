"""Exit reason and status: print each reason once, write the launcher's error file, and end the process."""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NoReturn

from megatron.config import RunConfig, parse_arguments
from megatron.core.console import print_line
from megatron.core.errors import ConfigurationError, MegatronError
from megatron.training.fault_tolerance import die_with_launcher, find_launcher, parent_of
from megatron.training.initialize import (
    LaunchEnvironment,
    elastic_run_id,
    is_first_failure,
    launcher_error_file,
    read_launch_environment,
)

OWN_RUN_ID = "megatron-"
"""Prefix of the torchrun run id of runs that ``megatron train`` starts, before 32 hexadecimal digits."""

# torchrun prints its report of a failed process at its very end. The exit reason is printed when torchrun has released
# its memory, which is after its report and before a parent that waits for torchrun continues.
_SPEAKER = """
import sys, time
words, deadline = sys.stdin.read(), time.monotonic() + float(sys.argv[2])
while time.monotonic() < deadline:
    try:
        with open(f"/proc/{sys.argv[1]}/cmdline", "rb") as file:
            if not file.read(1):
                break
    except OSError:
        break
    time.sleep(0.001)
sys.stderr.write(words)
"""
_LATEST_S = 10.0
"""Maximum wait for the end of a torchrun that itself waits for other ranks."""


def is_own_rank() -> bool:
    """Return whether ``megatron train`` started this process as a rank."""
    return re.fullmatch(OWN_RUN_ID + "[0-9a-f]{32}", elastic_run_id()) is not None


def is_own_launcher() -> bool:
    """Return whether ``megatron train`` started this process, and will print why it ended."""
    return is_own_rank() and bool(launcher_error_file())


def leave_reason(reason: str) -> bool:
    """Write the reason to the launcher's error file; return whether it could be written."""
    if not launcher_error_file():
        return False
    now = time.time_ns()
    extra = {"py_callstack": reason, "timestamp": str(now // 10**9), "time_ns": now}
    try:
        Path(launcher_error_file()).write_text(json.dumps({"message": {"message": reason, "extraInfo": extra}}))
    except OSError:
        return False
    return True


def say_last(lines: Sequence[str]) -> bool:
    """Schedule lines to be printed to standard error after torchrun's own report; return whether they will be.

    They will not be printed without torchrun, if torchrun has another standard error, or if its end also ends the
    container.
    """
    import subprocess  # imported only here, so that --help and valid command lines do not need it

    launcher = None if is_own_launcher() else find_launcher(elastic_run_id())
    if launcher is None or min(launcher, parent_of(launcher)) <= 1 or not _shares_stderr(launcher):
        return False
    try:
        speaker = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", _SPEAKER, str(launcher), str(_LATEST_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
            start_new_session=True,
        )
        assert speaker.stdin is not None
        with speaker.stdin as words:
            words.write("".join(f"{line}\n" for line in lines))
    except (OSError, ValueError):
        return False
    return True


def _shares_stderr(pid: int) -> bool:
    try:
        return os.readlink("/proc/self/fd/2") == os.readlink(f"/proc/{pid}/fd/2")
    except OSError:
        return False


# torchrun ends the other ranks within a fraction of a second after rank 0; a busy node may delay rank 0 by this much.
_WAIT_FOR_REPORT_S = 5.0
_MOST_SHOWN = 4000


def launch_environment_or_exit() -> LaunchEnvironment:
    """Read the launcher's environment, or end the program with status 2 if it is invalid.

    From here on the process ends when the launcher does.
    """
    try:
        launch = read_launch_environment()
    except ConfigurationError as error:
        sys.exit(refuse(error.problems, rank=0))
    die_with_launcher(elastic_run_id(), launch.rank)
    return launch


def reasons_of(error: MegatronError) -> tuple[str, ...]:
    """Return the lines that report an error."""
    return error.problems if isinstance(error, ConfigurationError) else (str(error),)


def one_line(text: str) -> str:
    """Escape line breaks and control characters of a text, and truncate a very long one."""
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[:_MOST_SHOWN])
    return shown if len(text) <= _MOST_SHOWN else f"{shown} … ({len(text)} characters)"


def refuse(reasons: Sequence[str], rank: int, status: int = 2) -> int:
    """Print one line per reason on rank 0 and return the exit status.

    torchrun ends all processes as soon as one has failed. So the other ranks wait, which gives rank 0 the time to
    print, and exit with the same status if torchrun ends them meanwhile.
    """
    if rank == 0:
        _say([f"error: {one_line(reason)}" for reason in reasons])
        return status

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(status)

    signal.signal(signal.SIGTERM, leave)
    time.sleep(_WAIT_FOR_REPORT_S)
    return status


def parse_arguments_or_exit(
    argv: Sequence[str], world_size: int = 1, rank: int = 0, *, is_train_command: bool = False
) -> RunConfig:
    """Call `parse_arguments`, and end the program with status 2 if the command line is wrong.

    Every rank ends; only rank 0 prints the problems, one line each. ``is_train_command`` is also assumed in processes
    that ``megatron train`` started.
    """
    try:
        return parse_arguments(argv, world_size, rank, is_train_command=is_train_command or is_own_rank())
    except ConfigurationError as error:
        sys.exit(refuse(error.problems, rank))


def refuse_in_run(reasons: Sequence[str], launch: LaunchEnvironment, status: int = 2) -> int:
    """Like ``refuse``, but if only some ranks have a reason, the first rank to fail prints its own."""
    if launch.rank == 0:
        is_first_failure()
        return refuse(reasons, launch.rank, status)
    status = refuse(reasons, launch.rank, status)
    if launch.world_size > 1 and is_first_failure():
        _say([f"error: rank {launch.rank}: {reason}" for reason in reasons])
    return status


def report_failure(error: Exception, launch: LaunchEnvironment) -> None:
    """Print the traceback of an unexpected error, and have the launcher print the error as the last line."""
    traceback.print_exc()
    line = f"error: rank {launch.rank}: {type(error).__name__}: {one_line(str(error))} (its traceback is above)"
    leave_reason(line)
    say_last([line])


def _say(lines: Sequence[str]) -> None:
    """Print lines as the last ones of the run.

    Under ``megatron train``, the launcher prints them. Under torchrun, its own report would follow lines that are
    printed immediately. So the lines of a wrong command line or of unusable data are printed after the report, and
    those of a run that had started are printed both times.
    """
    if is_own_launcher() and leave_reason("\n".join(lines)):
        return
    has_begun = "torch" in sys.modules
    if not has_begun and say_last(lines):
        return
    for line in lines:
        print_line(line, sys.stderr)
    if has_begun:
        say_last(lines)


def run_program(main: Callable[[], int]) -> NoReturn:
    """Run ``main`` and end the process with its return value, the status of its ``SystemExit``, or 1 if it fails.

    The functions registered with `atexit` are run and both streams are flushed, but the interpreter is not finalized.
    During finalization a thread that returns from native code, such as a thread of a communication library that
    releases a tensor, ends in ``std::terminate``: a finished run would be reported as crashed (SIGABRT), and a rejected
    one would not exit with status 2.
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
        except (OSError, ValueError):  # the reader closed the pipe, or the program closed the stream
            status = status or 1
    os._exit(status)
