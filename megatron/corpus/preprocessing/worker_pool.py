"""Start worker processes, hand them chunks and shared memory, and receive their reports."""

from __future__ import annotations

import mmap
import multiprocessing
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from types import TracebackType
from typing import Any, Final

from megatron.core.errors import MegatronError
from megatron.corpus.preprocessing.chunks import Chunk
from megatron.corpus.preprocessing.worker import Failure, Tally

_FEW_WORKERS: Final = 4


def num_slots(num_workers: int) -> int:
    """Return how many chunks each worker may be ahead of what is written."""
    return 4 if num_workers <= _FEW_WORKERS else 2


class WorkerError(MegatronError):
    """Report a worker that died or failed; what was written until then is kept."""


@dataclass
class Worker:
    """Hold one process, what it was given and has not tallied, and the memory that is shared with it.

    A slot holds the tokens of one chunk, from when it is given to the worker until they are written.
    """

    process: ForkProcess
    connection: Connection
    slots: list[memoryview]
    free_slots: list[int]
    chunks: list[Chunk] = field(default_factory=list)


class WorkerPool:
    """Run workers forked from this process, so that they share the tokenizer that it loaded.

    ``work`` is called in each with its connection and its slots of ``slot_bytes``, then ``arguments``.
    """

    def __init__(
        self, num_workers: int, slot_bytes: int, work: Callable[..., None], arguments: tuple[Any, ...]
    ) -> None:
        context = multiprocessing.get_context("fork")
        self._workers: list[Worker] = []
        for _ in range(num_workers):
            ours, theirs = context.Pipe()
            inherited = [worker.connection for worker in self._workers] + [ours]
            # Memory that nobody has written to costs nothing: a slot can be as large as the worst chunk needs it.
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
        """End the workers: at their next message, or at once."""
        for worker in self._workers:
            worker.connection.close()
            if not wait_for_them:
                worker.process.terminate()
        for worker in self._workers:
            worker.process.join()

    def free_worker(self, needs_idle: bool) -> Worker | None:
        """Return the worker with the least to do, or None while all have enough.

        A worker has several chunks before it (none when it must be idle), so that it goes on while this process waits
        for its turn or writes.
        """
        free = [worker for worker in self._workers if worker.free_slots and not (needs_idle and worker.chunks)]
        return min(free, key=lambda worker: len(worker.chunks), default=None)

    def submit(self, worker: Worker, chunk: Chunk) -> None:
        """Give a worker a chunk to tokenize, and a slot for it."""
        worker.chunks.append(chunk)
        try:
            worker.connection.send((chunk, worker.free_slots.pop()))
        except ConnectionError as error:
            # It may have said why before it went.
            while worker.connection.poll(0):
                self._read(worker)
            raise self._death(worker) from error

    def receive(self) -> list[tuple[Worker, Tally]]:
        """Wait for reports.

        Raises:
            WorkerError: a worker died, or met a fault of the program.
            InputError: a worker met input that cannot be used.
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
        raise WorkerError(f"worker process {worker.process.pid} failed; what it says stands above")

    def _death(self, worker: Worker) -> WorkerError:
        worker.process.join(timeout=10)
        code = worker.process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
            how += " (is memory short? try fewer --workers)" if code == -signal.SIGKILL else ""
        else:
            how = f"ended with status {code}"
        what = f" at chunk {worker.chunks[0].number}" if worker.chunks else ""
        return WorkerError(
            f"worker process {worker.process.pid} {how}{what}; run the same command again to go on from what is done"
        )


def _run(
    inherited: list[Connection],
    work: Callable[..., None],
    connection: Connection,
    slots: list[memoryview],
    arguments: tuple[Any, ...],
) -> None:
    # The leader's ends of all pipes came along; a worker must see its own end when the leader is gone.
    for other in inherited:
        other.close()
    work(connection, slots, *arguments)
