"""Pool of persistent processes that run jobs as the ranks of a small world."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.errors import TrainingError

Job = Callable[..., Any]
Inspection = Callable[[], Sequence[str]]
DeviceOfRank = Callable[[int], int]

_GRACE_S = 1.0


@dataclass(frozen=True)
class _Failure:
    """Failure of a rank; of several failures the one with the lowest order is reported.

    The order of a rank that raised an error is its time, on a clock that all processes share.
    """

    order: float
    text: str


class WorkerPool:
    """Pool that runs functions on 1 to ``size`` ranks; the processes start once and stay warm after the first job.

    With the backend ``nccl`` each rank has the CUDA device with its number, or the device that ``device_of_rank``
    returns, which is called on every rank before each job.

    A job is a module-level function that is called on every rank with the given arguments. The process group is
    initialized before it and destroyed after it. A job that fails ends all processes, whatever they are doing, and the
    next job starts new ones.

    ``inspect`` is called on every rank after each job, when the process group is destroyed. It returns further problems
    of the rank, and any problem fails the job.

    With ``forks`` the processes are forks of this one, which must have no other threads and imports torch for them.
    """

    def __init__(
        self,
        size: int,
        timeout_s: float = 120.0,
        backend: str = "gloo",
        inspect: Inspection | None = None,
        *,
        forks: bool = False,
        device_of_rank: DeviceOfRank = int,
    ) -> None:
        self.size = size
        self.backend = backend
        self.inspect = inspect
        self.timeout_s = timeout_s
        self._device_of_rank = device_of_rank
        self._folder = tempfile.TemporaryDirectory(prefix="verify-")
        self._num_jobs = 0
        self._context: BaseContext = multiprocessing.get_context("fork" if forks else "forkserver")
        # torch's optimizers import its compiler: do it once here instead of in every process.
        modules = ["megatron.verification.run_cell", "torch._dynamo"]
        if forks:
            for name in modules:
                importlib.import_module(name)
        else:
            self._context.set_forkserver_preload(modules)
        self._connections: list[Connection] = []
        self._processes: list[BaseProcess] = []

    def run(self, job: Job, world_size: int, *args: Any) -> list[Any]:
        """Run a job and return its results by rank.

        Raises:
            TrainingError: a rank raised an error, died, or did not answer in time; the message names it.
        """
        if not self._processes:
            self._start()
        self._num_jobs += 1
        store = Path(self._folder.name) / f"store-{self._num_jobs}"
        for rank in range(world_size):
            self._connections[rank].send((job, rank, world_size, str(store), self.timeout_s, self.backend, args))
        results: list[Any] = [None] * world_size
        failures: list[_Failure] = []
        waiting = {self._connections[rank]: rank for rank in range(world_size)}
        while waiting:
            # If one rank fails, its peers soon fail too. Wait for them, to determine which rank failed first.
            ready = wait(list(waiting), timeout=_GRACE_S if failures else self.timeout_s)
            if not ready:
                break
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    failed, value, when = connection.recv()
                except (EOFError, ConnectionResetError):
                    failures.append(_Failure(0, f"rank {rank} died"))
                    continue
                if failed:
                    failures.append(_Failure(when, f"rank {rank} raised:\n{value}"))
                else:
                    results[rank] = value
        if waiting and not failures:
            failures.append(
                _Failure(0, f"ranks {sorted(waiting.values())} did not answer within {self.timeout_s:.0f} s")
            )
        if failures:
            self._stop(kill=True)
            # A rank that died comes first, then the first that raised: the others lost their connection to it.
            raise TrainingError(min(failures, key=lambda failure: failure.order).text)
        return results

    def close(self) -> None:
        self._stop(kill=False)
        self._folder.cleanup()

    def _start(self) -> None:
        for _ in range(self.size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(  # type: ignore[attr-defined]
                target=_serve, args=(theirs, self.inspect, self._device_of_rank), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        for connection in self._connections:
            connection.recv()

    def _stop(self, kill: bool) -> None:
        for connection, process in zip(self._connections, self._processes):
            if kill:
                process.kill()
            else:
                connection.send(None)
            process.join()
            connection.close()
        self._connections, self._processes = [], []

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            # Processes in an interrupted job would not receive the request to end.
            self._stop(kill=True)
        self.close()


def _serve(connection: Connection, inspect: Inspection | None, device_of_rank: DeviceOfRank) -> None:
    torch.set_num_threads(1)
    # The time limit of a job starts when all processes are ready.
    connection.send("ready")
    while (message := connection.recv()) is not None:
        job, rank, world_size, store, timeout_s, backend, args = message
        failed = False
        try:
            if world_size > 1:
                dist.init_process_group(
                    backend,
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=world_size,
                    # Longer than the pool's own timeout, so that a hanging rank is reported and not the ranks that wait
                    # for it.
                    timeout=timedelta(seconds=2 * timeout_s),
                    device_id=torch.device("cuda", device_of_rank(rank)) if backend == "nccl" else None,
                )
                # Otherwise a short job could end and close its connections while another rank still connects.
                dist.barrier()
            value = job(*args)
        except Exception:  # noqa: BLE001 the parent process raises it
            failed, value = True, traceback.format_exc()
        # Taken before the connections close: the other ranks then fail at later times.
        when = time.monotonic()
        if dist.is_initialized():
            dist.destroy_process_group()
        if inspect is not None and (problems := inspect()):
            text = value if failed else ""
            failed, value = True, "\n".join([text, *(problem for problem in problems if problem not in text)]).strip()
        connection.send((failed, value, when))
    os._exit(0)
