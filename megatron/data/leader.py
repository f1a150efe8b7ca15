"""Distribute chunks to workers, write their results in the order of the input, and report the progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator, Sequence

from megatron.core.console import ProgressBar
from megatron.core.errors import DataError
from megatron.data.input_chunks import Chunk, read_chunk
from megatron.data.input_files import InputFile, advice
from megatron.data.work_folder import Entry, StreamTally, WorkFolder
from megatron.data.worker_pool import Tally, Worker, WorkerPool


class Progress:
    """Progress report with rates and the time left, every ``log_interval`` documents but at most once per second.

    On a terminal, a progress bar shows the same between the lines.

    ``total_bytes`` is the size of the input on disk, None if it is unknown, and ``source_bytes`` the part of it that is
    done. ``num_bytes`` counts the bytes of text, from which the rates are computed.
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
        """Start the clock."""
        self._start = self._last_report = self._clock()

    def add(self, num_documents: int, num_bytes: int, source_bytes: int) -> None:
        """Add finished work, and print a line if one is due."""
        self.num_documents += num_documents
        self.num_bytes += num_bytes
        self._source_bytes += source_bytes
        now = self._clock()
        if self.num_documents >= self._next_report and now - self._last_report >= 1:
            self._last_report = now
            self._next_report = (self.num_documents // self._log_interval + 1) * self._log_interval
            left = self._time_left()
            self.tell(f"Processed {self.rates()}." + (f" {left}." if left else ""))
        if self._bar.is_on:
            self._draw()

    def tell(self, line: str) -> None:
        """Print a line above the progress bar."""
        self._bar.clear()
        print(line, flush=True)

    def finish(self) -> None:
        """Print the totals instead of the progress bar."""
        self.tell(f"Processed {self.rates()}.")

    def _draw(self) -> None:
        text = ", ".join(part for part in (self.rates(), self._time_left()) if part)
        if self._total_bytes is None:
            self._bar.tell(f"processing {text}")
        else:
            self._bar.show("processing", self._source_bytes, self._total_bytes, text)

    @property
    def elapsed_s(self) -> float:
        return max(self._clock() - self._start, 1e-9)

    def rates(self) -> str:
        """Return the number of finished documents and the rates as text."""
        elapsed_s = self.elapsed_s
        documents_s, megabytes_s = self.num_documents / elapsed_s, self.num_bytes / 1e6 / elapsed_s
        return f"{self.num_documents} documents ({documents_s:.1f} docs/s, {megabytes_s:.2f} MB/s)"

    def _time_left(self) -> str:
        if self._total_bytes is None:
            return ""
        left_s = max(0, self._total_bytes - self._source_bytes) * self.elapsed_s / max(self._source_bytes, 1)
        minutes, seconds = divmod(round(left_s), 60)
        hours, minutes = divmod(minutes, 60)
        return f"{hours}:{minutes:02}:{seconds:02} left"


class Leader:
    """Coordinator of the workers, until all chunks are written and recorded.

    Any worker may tokenize any chunk, but chunks are written in order, so the result does not depend on the workers.
    """

    def __init__(
        self,
        pool: WorkerPool,
        folder: WorkFolder,
        files: Sequence[InputFile],
        num_partitions: int,
        skip_errors: bool,
        progress: Progress,
    ) -> None:
        self._pool = pool
        self._folder = folder
        self._files = files
        self._num_partitions = num_partitions
        self._skip_errors = skip_errors
        self._progress = progress
        self._chunks: dict[int, Chunk] = {}
        self._tallies: dict[int, tuple[Worker, Tally]] = {}

    def run(self, chunks: Iterator[Chunk]) -> None:
        """Tokenize and write all chunks.

        Raises:
            InputError: the input cannot be used, or the output cannot be written; earlier chunks stay recorded.
            WorkerError: a worker died.
        """
        upcoming, opened = next(chunks, None), None
        while upcoming is not None or self._chunks:
            while upcoming is not None:
                worker = self._pool.free_worker(needs_idle=upcoming.data is not None)
                if worker is None:
                    break
                if upcoming.file != opened:
                    opened = upcoming.file
                    self._progress.tell(f"Opening {self._files[opened].name}")
                self._chunks[upcoming.number] = upcoming
                self._pool.submit(worker, upcoming)
                upcoming = next(chunks, None)
            self._tallies |= {tally.chunk: (worker, tally) for worker, tally in self._pool.receive()}
            while self._folder.num_chunks in self._tallies:
                self._write(*self._tallies.pop(self._folder.num_chunks))

    def _write(self, worker: Worker, tally: Tally) -> None:
        """Write the next chunk in order."""
        if tally.problems and not self._skip_errors:
            self._refuse(tally)
        chunk = self._chunks.pop(tally.chunk)
        for problem in tally.problems:
            print(f"{self._line_name(chunk, problem.line)}: {problem.message}; skipped", file=sys.stderr)
        slot = worker.slots[tally.slot]
        contents = [
            (one.tokens if one.place is None else slot[slice(*one.place)], one.lengths, one.counts)
            for one in tally.streams
        ]
        streams = [(self._stream(index), StreamTally.of(*parts)) for index, parts in enumerate(contents)]
        entry = Entry(chunk, tally.num_lines, tally.num_documents, len(tally.problems), streams)
        self._folder.commit(entry, contents)
        worker.free_slots.append(tally.slot)
        self._progress.add(tally.num_documents, chunk.num_bytes, chunk.source_bytes)

    def _stream(self, index: int) -> int:
        """Convert a stream index within the chunk to the stream index within the input."""
        key, partition = divmod(index, self._num_partitions)
        return key * self._num_partitions + (partition + self._folder.num_lines) % self._num_partitions

    def _line_name(self, chunk: Chunk, line: int) -> str:
        """Return the name of a line of the next chunk to be recorded."""
        last = self._folder.last
        before = self._folder.num_lines_before if last is not None and last.file == chunk.file else 0
        return self._files[chunk.file].line_name(before + line)

    def _refuse(self, tally: Tally) -> None:
        problem = tally.problems[0]
        chunk = self._chunks[tally.chunk]
        line = read_chunk(chunk, self._files[chunk.file]).split(b"\n")[problem.line]
        way_on = advice(line) or "fix the line, or skip such lines with --on-error skip"
        raise DataError(f"{self._line_name(chunk, problem.line)}: {problem.message}; {way_on}")
