"""Worker processes that tokenize chunks and report their results through shared memory."""

from __future__ import annotations

import mmap
import multiprocessing
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Any, Final

import numpy as np

from megatron.core.errors import InputError, MegatronError
from megatron.data.input_chunks import Chunk, read_chunk
from megatron.data.input_files import InputFile
from megatron.data.json_lines import Problem
from megatron.data.tokenized_chunk import Recipe, TokenizedChunk, tokenize_block


@dataclass(frozen=True)
class Content:
    """Data that a chunk adds to one stream.

    Attributes:
        place: byte range of the tokens in shared memory. None if they are in ``tokens``.
        lengths, counts: the bytes of the arrays.
    """

    place: tuple[int, int] | None
    tokens: bytes
    lengths: bytes
    counts: bytes


@dataclass(frozen=True)
class Tally:
    """Result of a chunk, and the slot that holds its tokens."""

    chunk: int
    slot: int
    streams: list[Content]
    num_lines: int
    num_documents: int
    problems: list[Problem]


@dataclass(frozen=True)
class Failure:
    """Error that ends a worker: unusable input, or a bug with its traceback."""

    error: InputError | None
    traceback: str


def work(
    connection: Connection,
    slots: Sequence[memoryview],
    files: Sequence[InputFile],
    recipe: Recipe,
    max_growth_bytes: int,
) -> None:
    """Tokenize the chunks from the connection, each into its slot, until the connection is closed.

    The slots are shared memory with the leader. The process grows by at most about ``max_growth_bytes``.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the leader handles a keyboard interrupt
    try:
        rooms = [np.frombuffer(slot, recipe.dtype) for slot in slots]
        start_bytes = _memory_bytes()
        while True:
            chunk, slot = connection.recv()
            done = tokenize_block(read_chunk(chunk, files[chunk.file]), recipe, rooms[slot])
            connection.send(_tally(chunk.number, slot, done))
            if _memory_bytes() - start_bytes > max_growth_bytes:
                recipe.encoder.renew()
                start_bytes = _memory_bytes()
    except (EOFError, ConnectionError):
        return  # the leader has died, or has all results
    except InputError as error:
        connection.send(Failure(error, ""))
    except Exception:  # noqa: BLE001 - the leader reports the error with its traceback
        connection.send(Failure(None, traceback.format_exc()))


def _tally(number: int, slot: int, chunk: TokenizedChunk) -> Tally:
    contents = []
    for stream in chunk.streams:
        place, tokens = None, b""
        if stream.begin is None:
            tokens = stream.tokens.tobytes()
        else:
            begin = stream.begin * stream.tokens.itemsize
            place = (begin, begin + stream.tokens.nbytes)
        contents.append(Content(place, tokens, stream.lengths.tobytes(), stream.counts.tobytes()))
    return Tally(number, slot, contents, chunk.num_lines, chunk.num_documents, chunk.problems)


def _memory_bytes() -> int:
    """Return the private resident memory of this process; 0 if the system does not report it."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


_FEW_WORKERS: Final = 4


def num_slots(num_workers: int) -> int:
    """Return how many unwritten chunks each worker may have."""
    return 4 if num_workers <= _FEW_WORKERS else 2


class WorkerError(MegatronError):
    """A worker died or failed. Chunks written before are kept."""


@dataclass
class Worker:
    """Worker process with its pending chunks and its shared memory.

    A slot holds the tokens of one chunk, from the submission of the chunk until the tokens are written.
    """

    process: ForkProcess
    connection: Connection
    slots: list[memoryview]
    free_slots: list[int]
    chunks: list[Chunk] = field(default_factory=list)


class WorkerPool:
    """Pool of workers that are forked from this process, so that they share its tokenizer.

    ``work`` is called in each worker with its connection, its slots of ``slot_bytes`` each, and ``arguments``.
    """

    def __init__(
        self, num_workers: int, slot_bytes: int, work: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._workers: list[Worker] = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            inherited = [worker.connection for worker in self._workers] + [ours]
            # Untouched memory is free, so a slot can have the size of the worst case.
            slots = [memoryview(mmap.mmap(-1, slot_bytes)) for _ in range(num_slots(num_workers))]
            process = context.Process(target=_run, args=(inherited, work, theirs, slots, arguments), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(Worker(process, ours, slots, list(range(len(slots)))))

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close(wait_for_them=kind is None)

    def close(self, wait_for_them: bool) -> None:
        """Stop the workers, after their current chunk or immediately."""
        for worker in self._workers:
            worker.connection.close()
            if not wait_for_them:
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join()

    def free_worker(self, needs_idle: bool) -> Worker | None:
        """Return the worker with the fewest pending chunks, or None if no worker has a free slot.

        A worker queues several chunks, so that it stays busy while this process waits or writes. With ``needs_idle``,
        only a worker without pending chunks is returned.
        """
        free = [worker for worker in self._workers if worker.free_slots and not (needs_idle and worker.chunks)]
        return min(free, key=lambda worker: len(worker.chunks), default=None)

    def submit(self, worker: Worker, chunk: Chunk) -> None:
        """Send a chunk and a free slot to a worker."""
        worker.chunks.append(chunk)
        try:
            worker.connection.send((chunk, worker.free_slots.pop()))
        except ConnectionError as error:
            # The worker may have reported an error before it died.
            while worker.connection.poll(0):
                self._read(worker)
            raise self._death(worker) from error

    def receive(self) -> list[tuple[Worker, Tally]]:
        """Wait for results of the workers.

        Raises:
            WorkerError: a worker died or hit a bug.
            InputError: a worker read unusable input.
        """
        by_connection = {worker.connection: worker for worker in self._workers}
        reports = []
        for connection in wait(list(by_connection)):
            worker = by_connection[connection]  # type: ignore[index]
            tally = self._read(worker)
            worker.chunks = [chunk for chunk in worker.chunks if chunk.number != tally.chunk]
            reports.append((worker, tally))
        return reports

    def _read(self, worker: Worker) -> Tally:
        try:
            message: Tally | Failure = worker.connection.recv()
        except (EOFError, ConnectionError) as error:
            raise self._death(worker) from error
        if isinstance(message, Tally):
            return message
        if message.error is not None:
            raise message.error
        print(message.traceback, file=sys.stderr, end="")
        raise WorkerError(f"worker process {worker.process.pid} failed; see its output above")

    def _death(self, worker: Worker) -> WorkerError:
        worker.process.join(timeout=10)
        code = worker.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (perhaps out of memory: try fewer --workers)" if code == -signal.SIGKILL else ""
        else:
            how = f"ended with status {code}"
        what = f" at chunk {worker.chunks[0].number}" if worker.chunks else ""
        return WorkerError(f"worker process {worker.process.pid} {how}{what}; run the same command again to resume")


def _run(
    inherited: list[Connection],
    work: Callable[..., None],
    connection: Connection,
    slots: list[memoryview],
    arguments: tuple[Any, ...],
) -> None:
    # Close the inherited leader ends of all pipes, so that the worker gets an EOF when the leader dies.
    for other in inherited:
        other.close()
    work(connection, slots, *arguments)
