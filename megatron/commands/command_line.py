"""What the command lines of the tools share: one line for wrong usage or bad input, and the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron.core.errors import InputError, MegatronError


class Parser(argparse.ArgumentParser):
    """Report wrong usage in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def exit_status_of(work: Callable[[], None]) -> int:
    """Do a tool's work and return its exit status: 2 for input that cannot be used, 1 where the work failed.

    Either is said in one line.
    """
    try:
        work()
    except (MegatronError, OSError) as error:
        lines = (line.strip() for line in str(error).splitlines())
        print(f"error: {'; '.join(lines).replace(':;', ':')}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0
