"""Refuse a run: print the reasons once, whatever the number of processes, and give every process the exit status."""

from __future__ import annotations

import signal
import sys
import time
import traceback
from collections.abc import Sequence
from types import FrameType
from typing import NoReturn

from megatron.core.errors import ConfigurationError, MegatronError
from megatron.training.process.console import print_line
from megatron.training.process.initialize import (
    LaunchEnvironment,
    elastic_run_id,
    is_first_failure,
    read_launch_environment,
)
from megatron.training.process.last_words import is_own_launcher, leave_reason, say_last
from megatron.training.process.launcher import die_with_launcher

# torchrun ends the others within a fraction of a second of rank 0: this is how late rank 0 may be on a busy machine.
_WAIT_FOR_REPORT_S = 5.0
_MOST_SHOWN = 4000


def launch_environment_or_exit() -> LaunchEnvironment:
    """Return what the launcher says, or end the program with status 2 where it cannot be understood.

    From here on the process ends when the launcher does.
    """
    try:
        launch = read_launch_environment()
    except ConfigurationError as error:
        sys.exit(refuse(error.problems, rank=0))
    die_with_launcher(elastic_run_id(), launch.rank)
    return launch


def reasons_of(error: MegatronError) -> tuple[str, ...]:
    """Return the lines that an error is reported by."""
    return error.problems if isinstance(error, ConfigurationError) else (str(error),)


def one_line(text: str) -> str:
    """Return text with what would break its line, or change the terminal, spelt out; a very long one cut short."""
    shown = "".join(character if character.isprintable() else repr(character)[1:-1] for character in text[:_MOST_SHOWN])
    return shown if len(text) <= _MOST_SHOWN else f"{shown} … ({len(text)} characters)"


def refuse(reasons: Sequence[str], rank: int, status: int = 2) -> int:
    """Print one line a reason on rank 0 and return the exit status.

    torchrun ends all processes as soon as one has failed. So the other ranks wait, which gives rank 0 the time to
    print, and exit with the same status where torchrun ends them meanwhile.
    """
    if rank == 0:
        _say([f"error: {one_line(reason)}" for reason in reasons])
        return status

    def leave(number: int, frame: FrameType | None) -> NoReturn:
        sys.exit(status)

    signal.signal(signal.SIGTERM, leave)
    time.sleep(_WAIT_FOR_REPORT_S)
    return status


def refuse_in_run(reasons: Sequence[str], launch: LaunchEnvironment, status: int = 2) -> int:
    """Refuse as ``refuse`` does, also where only one rank has a reason: the first rank to fail prints its own."""
    if launch.rank == 0:
        is_first_failure()
        return refuse(reasons, launch.rank, status)
    status = refuse(reasons, launch.rank, status)
    if launch.world_size > 1 and is_first_failure():
        _say([f"error: rank {launch.rank}: {reason}" for reason in reasons])
    return status


def report_failure(error: Exception, launch: LaunchEnvironment) -> None:
    """Print the traceback of a fault of the program, and have the launcher name the error last."""
    traceback.print_exc()
    line = f"error: rank {launch.rank}: {type(error).__name__}: {one_line(str(error))} (its traceback is above)"
    leave_reason(line)
    say_last([line])


def _say(lines: Sequence[str]) -> None:
    """Print lines as the last ones of the run.

    Where ``megatron train`` watches it, that is left to it. torchrun's report comes between lines that are printed at
    once and the end: those of a wrong command line or wrong data wait for it, and those of a run that had begun are
    printed again.
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
