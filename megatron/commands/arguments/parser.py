"""Parsers of command lines that take wrong usage for a typing error where it looks like one."""

from __future__ import annotations

import argparse
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

_CLOSE = 0.8
"""Share of the letters that must agree: ``--laod`` is 0.83 of ``--load``."""


def dispatcher() -> str | None:
    """Return how the program was called that runs commands by their names; None where another runs."""
    called = Path(sys.argv[0])
    if called.parts[-3:] == ("megatron", "commands", "__main__.py"):
        return "python -m megatron.commands"
    return "megatron" if called.name == "megatron" else None


class SpellingParser(argparse.ArgumentParser):
    """Parse a command line, and know what was typed where it is refused."""

    typed: Sequence[str] = ()
    """The words of the command line; empty where some are for another parser."""

    def format_help(self) -> str:
        """Return the help, whose usage names the command as it was called."""
        if (program := dispatcher()) is not None and len(sys.argv) > 1:
            self.prog = f"{program} {sys.argv[1]}"
        return super().format_help()

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse words that are all for this parser, as argparse does."""
        self.typed = sys.argv[1:] if args is None else args
        return super().parse_args(args, namespace)

    def explained(self, message: str) -> str:
        """Return argparse's message with the flag that was meant, or with where the flags are listed.

        argparse looks for flags that are missing before it names those that it does not know: of ``--laod DIR`` it
        says only that ``--load`` is missing.
        """
        return f"{message}; {self._likely_typing_error(message) or 'see --help'}"

    def _likely_typing_error(self, message: str) -> str | None:
        known = [flag for flag in self._option_string_actions if flag.startswith("--")]
        for word in self.typed:
            name = word.partition("=")[0]
            if not name.startswith("--") or name == "--" or name in known:
                continue
            longer = [flag for flag in known if flag.startswith(name)]
            longer.sort(key=lambda flag: flag not in message)
            if longer and self.allow_abbrev:
                continue
            nearest = longer or difflib.get_close_matches(name, known, n=1, cutoff=_CLOSE)
            if nearest:
                return f"there is no {name}, did you mean {nearest[0]}?"
        return None


class Parser(SpellingParser):
    """Report wrong usage in one line."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit with status 2."""
        self.exit(2, f"error: {self.explained(message)}\n")
