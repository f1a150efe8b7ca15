"""Print lines that stay whole where several processes share a terminal or a file."""

from __future__ import annotations

import sys
from typing import TextIO


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print text and its end of line in one write, which lines of other processes cannot come between.

    ``print`` makes two of it under ``PYTHONUNBUFFERED``.
    """
    stream = stream or sys.stdout
    stream.write(text + "\n")
    stream.flush()
