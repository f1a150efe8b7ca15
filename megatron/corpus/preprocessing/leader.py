"""Hand chunks to workers and write their results in the order of the input."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from megatron.core.errors import DataError
from megatron.corpus.preprocessing.chunks import Chunk, read_chunk
from megatron.corpus.preprocessing.file_format import advice
from megatron.corpus.preprocessing.input_files import InputFile
from megatron.corpus.preprocessing.manifest import Entry, StreamTally
from megatron.corpus.preprocessing.progress import Progress
from megatron.corpus.preprocessing.work_folder import WorkFolder
from megatron.corpus.preprocessing.worker import Tally
from megatron.corpus.preprocessing.worker_pool import Worker, WorkerPool


class Leader:
    """Drive workers over chunks until all are written and recorded.

    A chunk is tokenized by any worker at any time, and written as soon as all before it are. So the result does not
    depend on the workers.
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
            InputError: the input cannot be used, or the output not written; what was written before is recorded.
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
            self._tallies |= {tally.chunk: (worker, tally) for worker, tally in self._pool.receive()}
            while self._folder.num_chunks in self._tallies:
                self._write(*self._tallies.pop(self._folder.num_chunks))

    def _write(self, worker: Worker, tally: Tally) -> None:
        """Write the chunk whose turn it is."""
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
        """Turn the partition of a document within its chunk into that within the input."""
        key, partition = divmod(index, self._num_partitions)
        return key * self._num_partitions + (partition + self._folder.num_lines) % self._num_partitions

    def _line_name(self, chunk: Chunk, line: int) -> str:
        """Name a line of the next chunk to be recorded."""
        last = self._folder.last
        before = self._folder.num_lines_before if last is not None and last.file == chunk.file else 0
        return self._files[chunk.file].line_name(before + line)

    def _refuse(self, tally: Tally) -> None:
        problem = tally.problems[0]
        chunk = self._chunks[tally.chunk]
        line = read_chunk(chunk, self._files[chunk.file]).split(b"\n")[problem.line]
        way_on = advice(line) or "correct the line, or leave such lines out with --on-error skip"
        raise DataError(f"{self._line_name(chunk, problem.line)}: {problem.message}; {way_on}")
