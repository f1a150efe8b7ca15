"""Report the progress of preprocessing."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.core.console import ProgressBar


class Progress:
    """Print rates and the time left, every so many documents, and not more than once a second.

    On a terminal a bar shows the same between two lines.

    ``total_bytes`` is the size of the input on disk, None where it is not known, and ``source_bytes`` what is done
    of it; ``num_bytes`` counts text, which rates are of.
    """

    def __init__(self, total_bytes: int | None, log_interval: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_documents = self.num_bytes = 0
        self._source_bytes = 0
        self._total_bytes = total_bytes
        self._log_interval = log_interval
        self._next_report = log_interval
        self._clock = clock
        self._bar = ProgressBar()
        self.start()

    def start(self) -> None:
        """Let the time begin now."""
        self._start = self._last_report = self._clock()

    def add(self, num_documents: int, num_bytes: int, source_bytes: int) -> None:
        """Count what was finished, and print a line where one is due."""
        self.num_documents += num_documents
        self.num_bytes += num_bytes
        self._source_bytes += source_bytes
        now = self._clock()
        if self.num_documents >= self._next_report and now - self._last_report >= 1:
            self._last_report = now
            self._next_report = (self.num_documents // self._log_interval + 1) * self._log_interval
            self._bar.clear()
            print(f"Processed {self.rates()}{self._time_left()}.", flush=True)
        if self._bar.is_on:
            self._draw()

    def finish(self) -> None:
        """Take the bar away."""
        self._bar.clear()

    def _draw(self) -> None:
        text = f"{self.rates()}{self._time_left()}"
        if self._total_bytes is None:
            self._bar.tell(f"processing {text}")
        else:
            self._bar.show("processing", self._source_bytes, self._total_bytes, text)

    @property
    def elapsed_s(self) -> float:
        """Give the seconds since the start."""
        return max(self._clock() - self._start, 1e-9)

    def rates(self) -> str:
        """Return the number of documents that are done, and the rates."""
        elapsed_s = self.elapsed_s
        documents_s, megabytes_s = self.num_documents / elapsed_s, self.num_bytes / 1e6 / elapsed_s
        return f"{self.num_documents} documents ({documents_s:.1f} docs/s, {megabytes_s:.2f} MB/s)"

    def _time_left(self) -> str:
        if self._total_bytes is None:
            return ""
        left_s = max(0, self._total_bytes - self._source_bytes) * self.elapsed_s / max(self._source_bytes, 1)
        minutes, seconds = divmod(round(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f", {hours}:{minutes:02}:{seconds:02} left"
