"""Console output: atomic lines from several processes, and progress bars."""

from __future__ import annotations

import contextlib
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final, TextIO

Log = Callable[[str], None]
"""Prints a line; in a run, only on rank 0."""

CLEAR_LINE = "\r\x1b[2K"
"""Clears the terminal line that contains the cursor."""


def print_line(text: str, stream: TextIO | None = None) -> None:
    """Print text and its newline in one write, so that lines of other processes do not interleave with it.

    ``print`` issues two writes under ``PYTHONUNBUFFERED``. On a terminal the text replaces the current status line.
    """
    stream = stream or sys.stdout
    stream.write(f"{CLEAR_LINE if stream.isatty() else ''}{text}\n")
    stream.flush()


_BAR_WIDTH = 24
_REDRAW_S = 0.1
_WAITING_REDRAW_S = 0.5
SIGN_OF_LIFE_S: Final = 10.0
"""Seconds without a line after which a brief log prints what a run is doing."""


class ProgressBar:
    """Progress bar on stderr or another stream, drawn only if the stream is a terminal.

    The cursor stays at the start of the line. Clear the bar before printing a line.
    """

    def __init__(self, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream = sys.stderr if stream is None else stream
        self.is_on = self._stream is not None and self._stream.isatty()
        self._clock = clock
        self._drawn = -_REDRAW_S

    def show(self, what: str, done: int, total: int, more: str = "") -> None:
        """Draw the progress followed by ``more``; skip drawing if the last drawing is too recent."""
        if self.is_on:
            self.tell(" ".join(filter(None, (what, format_bar(done, total), more))))

    def tell(self, text: str) -> None:
        """Draw a status text, for progress without a known total."""
        now = self._clock() if self.is_on else 0.0
        if self.is_on and now - self._drawn >= _REDRAW_S:
            self._drawn = now
            width = shutil.get_terminal_size().columns - 1
            self._stream.write(f"{CLEAR_LINE}{text[:width]}\r")
            self._stream.flush()

    def clear(self) -> None:
        """Clear the status line; the next drawing is not delayed."""
        if self.is_on:
            self._drawn = self._clock() - _REDRAW_S
            self._stream.write(CLEAR_LINE)
            self._stream.flush()


class CountedBar:
    """Progress bar that counts toward a total; as a context manager it clears the bar on exit."""

    def __init__(self, what: str, total: int, bar: ProgressBar | None = None) -> None:
        self._what, self._total, self._done = what, total, 0
        self._bar = ProgressBar() if bar is None else bar

    def add(self, number: int) -> None:
        """Add ``number`` to the count and redraw the bar."""
        self._done += number
        self._bar.show(self._what, self._done, self._total)

    def clear(self) -> None:
        """Clear the bar, so that a line can be printed."""
        self._bar.clear()

    def __enter__(self) -> CountedBar:
        return self

    def __exit__(self, *_: object) -> None:
        """Clear the bar."""
        self._bar.clear()


@contextlib.contextmanager
def waiting(text: str, *, is_on: bool = True, prints: bool = False) -> Iterator[Callable[[int, int], None]]:
    """Show a text with the elapsed time until the context exits.

    The context yields a function of (done, total); calling it adds a progress bar to the line. If standard error is no
    terminal, nothing is shown, or with ``prints`` a line on standard output every `SIGN_OF_LIFE_S` seconds.
    """
    bar, ending, since = ProgressBar(), threading.Event(), time.monotonic()
    drawn = [text]

    def told(done: int, total: int) -> None:
        drawn[0] = f"{text} {format_bar(done, total)}"

    def draw() -> None:
        while not ending.wait(_WAITING_REDRAW_S if bar.is_on else SIGN_OF_LIFE_S):
            line = f"{drawn[0]} {format_duration(time.monotonic() - since)}"
            if bar.is_on:
                bar.tell(line)
            else:
                print_line(f" ... {line}")

    if not (is_on and (bar.is_on or prints)):
        yield told
        return
    thread = threading.Thread(target=draw, name="waiting line", daemon=True)
    thread.start()
    try:
        yield told
    finally:
        ending.set()
        thread.join()
        bar.clear()


def format_bar(done: int, total: int) -> str:
    """Return a bar and the completed percentage."""
    share = min(done / max(total, 1), 1.0)
    return f"[{'=' * int(share * _BAR_WIDTH):<{_BAR_WIDTH}}] {share:4.0%}"


def format_duration(seconds: float) -> str:
    """Format seconds with the two largest units: 42s, 3m05s, 2h07m, 3d04h."""
    whole = int(max(seconds, 0.0))
    for size, name, rest, of_rest in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= size:
            return f"{whole // size}{name}{whole % size // rest:02d}{of_rest}"
    return f"{whole}s"
