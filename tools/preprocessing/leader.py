"""Hand chunks to workers and put what they make in the order of the input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from megatron.core.errors import DataError
from tools.preprocessing.chunks import Chunk
from tools.preprocessing.input_files import InputFile
from tools.preprocessing.manifest import Entry
from tools.preprocessing.progress import Progress
from tools.preprocessing.work_folder import WorkFolder
from tools.preprocessing.worker import Place, Tally
from tools.preprocessing.worker_pool import Worker, WorkerPool


class Leader:
    """Drive workers over chunks until all are written and recorded.

    A chunk is tokenized by any worker at any time; where it goes is known as soon as all chunks before it are
    tallied, and it is recorded as soon as all before it are written. So the result does not depend on the workers.
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
        self._places: dict[int, tuple[Place, Tally]] = {}
        self._written: set[int] = set()
        self._next_to_place = folder.num_chunks
        self._offsets = [list(offsets) for offsets in folder.offsets]
        self._num_lines = folder.num_lines

    def run(self, chunks: Iterator[Chunk]) -> None:
        """Do all chunks.

        Raises:
            InputError: the input cannot be used; what stands before the fault is recorded.
            WorkerError: a worker died.
        """
        upcoming = next(chunks, None)
        while upcoming is not None or self._chunks:
            while upcoming is not None:
                worker = self._pool.free_worker(needs_idle=upcoming.data is not None)
                if worker is None:
                    break
                self._chunks[upcoming.number] = upcoming
                self._pool.submit(worker, upcoming)
                upcoming = next(chunks, None)
            for worker, report in self._pool.receive():
                if isinstance(report, Tally):
                    self._tallies[report.chunk] = (worker, report)
                else:
                    self._written.add(report.chunk)
            self._place()
            self._commit()

    def _place(self) -> None:
        while self._next_to_place in self._tallies:
            worker, tally = self._tallies.pop(self._next_to_place)
            if tally.problems and not self._skip_errors:
                # All before it are placed, hence on their way; nothing after it will be.
                self._finish_written()
                self._refuse(tally)
            streams = [self._stream(index) for index in range(len(tally.streams))]
            offsets = []
            for stream, part in zip(streams, tally.streams):
                tokens, lengths, counts = self._offsets[stream]
                offsets.append((tokens, lengths, counts))
                self._offsets[stream] = [old + new for old, new in zip(self._offsets[stream], part.num_bytes)]
            place = Place(tally.chunk, streams, offsets)
            self._places[tally.chunk] = (place, tally)
            self._pool.place(worker, place)
            self._num_lines += tally.num_lines
            self._next_to_place += 1

    def _stream(self, index: int) -> int:
        """Turn the partition of a document within its chunk into that within the input."""
        key, partition = divmod(index, self._num_partitions)
        return key * self._num_partitions + (partition + self._num_lines) % self._num_partitions

    def _finish_written(self) -> None:
        while self._folder.num_chunks < self._next_to_place:
            for _, report in self._pool.receive():
                if not isinstance(report, Tally):
                    self._written.add(report.chunk)
            self._commit()

    def _commit(self) -> None:
        while self._folder.num_chunks in self._written:
            number = self._folder.num_chunks
            self._written.remove(number)
            place, tally = self._places.pop(number)
            chunk = self._chunks.pop(number)
            for problem in tally.problems:
                print(f"{self._line_name(chunk, problem.line)}: {problem.message}; skipped", file=sys.stderr)
            self._folder.commit(
                Entry(
                    chunk,
                    tally.num_lines,
                    tally.num_documents,
                    len(tally.problems),
                    list(zip(place.streams, tally.streams)),
                )
            )
            self._progress.add(tally.num_documents, chunk.num_bytes, chunk.source_bytes)

    def _line_name(self, chunk: Chunk, line: int) -> str:
        """Name a line of the next chunk to be recorded."""
        last = self._folder.last
        before = self._folder.num_lines_before if last is not None and last.file == chunk.file else 0
        return f"{self._files[chunk.file].name}:{before + line + 1}"

    def _refuse(self, tally: Tally) -> None:
        problem = tally.problems[0]
        message = f"{self._line_name(self._chunks[tally.chunk], problem.line)}: {problem.message}"
        raise DataError(f"{message}; correct the line, or leave such lines out with --on-error skip")
