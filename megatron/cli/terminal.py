"""Reading lines from a terminal or a pipe, and printing text that a model generated."""

from __future__ import annotations

import contextlib
import sys

from megatron.core.errors import InputError


class LineInput:
    """Lines of standard input; in a terminal a prompt is shown and lines can be edited."""

    def __init__(self, prompt: str) -> None:
        self.is_terminal = sys.stdin.isatty()
        self._prompt = prompt if self.is_terminal else ""
        if self.is_terminal:
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - enables line editing in input()

    def read(self) -> str | None:
        """Return the next line without surrounding spaces; None at the end of the input and after Ctrl-C.

        Raises:
            InputError: the line is not valid UTF-8.
        """
        try:
            line = input(self._prompt).strip()
        except (EOFError, KeyboardInterrupt):
            if self.is_terminal:
                print()
            return None
        except UnicodeDecodeError as error:
            raise InputError(f"standard input is not valid UTF-8: {error}; convert it") from error
        # Python decodes bytes that are not UTF-8 to lone surrogates in some locales.
        if any("\ud800" <= character <= "\udfff" for character in line):
            raise InputError("standard input is not valid UTF-8; convert it")
        return line


def printable(text: str) -> str:
    """Replace control characters, which could change the state of the terminal."""
    return "".join(each if each.isprintable() or each in "\n\t" else "\ufffd" for each in text)
