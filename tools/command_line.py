"""What the command lines of the tools share: one line for wrong usage or bad input, and the exit status."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import NoReturn

from megatron.core.errors import InputError


class Parser(argparse.ArgumentParser):
    """Report wrong usage in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"{self.prog}: {message}; see --help\n")


def exit_status_of(work: Callable[[], None]) -> int:
    """Do a tool's work and return its exit status: 2 for input that cannot be used, 1 where the file system refuses."""
    try:
        work()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0
