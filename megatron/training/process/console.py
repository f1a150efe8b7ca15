"""Print lines that stay whole where several processes share a terminal or a file."""

from __future__ import annotations

import sys
from typing import TextIO

CLEAR_LINE = "\r\x1b[2K"
"""Clears the line of a terminal that the cursor is in."""


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print text and its end of line in one write, which lines of other processes cannot come between.

    ``print`` makes two of it under ``PYTHONUNBUFFERED``. On a terminal the text takes the place of the line that shows
    where the run is.
    """
    stream = stream or sys.stdout
    stream.write(f"{CLEAR_LINE if stream.isatty() else ''}{text}\n")
    stream.flush()
