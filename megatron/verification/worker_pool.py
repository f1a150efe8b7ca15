"""Processes that stay up and run one job after another as the ranks of a small gloo world."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.errors import TrainingError

Job = Callable[..., Any]


class WorkerPool:
    """Run functions on 1 to ``size`` ranks; the processes are started once and warm from the first job on.

    A job is a module-level function that is called on every rank with the given arguments; the process group is
    initialised before it and destroyed after it.
    """

    def __init__(self, size: int, timeout_s: float = 120.0) -> None:
        self.size = size
        self.timeout_s = timeout_s
        self._folder = tempfile.TemporaryDirectory(prefix="verify-")
        self._num_jobs = 0
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megatron.verification.run_cell"])
        self._connections: list[Connection] = []
        self._processes = []
        for _ in range(size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def run(self, job: Job, world_size: int, *args: Any) -> list[Any]:
        """Return what the job returned on each rank.

        Raises:
            TrainingError: a rank raised, died, or did not answer in time; the pool cannot be used after that.
        """
        self._num_jobs += 1
        store = Path(self._folder.name) / f"store-{self._num_jobs}"
        for rank in range(world_size):
            self._connections[rank].send((job, rank, world_size, str(store), self.timeout_s, args))
        results: list[Any] = [None] * world_size
        waiting = {self._connections[rank]: rank for rank in range(world_size)}
        while waiting:
            ready = wait(list(waiting), timeout=self.timeout_s)
            if not ready:
                self.close(kill=True)
                raise TrainingError(f"ranks {sorted(waiting.values())} did not answer within {self.timeout_s:.0f} s")
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                results[rank] = self._receive(connection, rank)
        return results

    def _receive(self, connection: Connection, rank: int) -> Any:
        try:
            failed, value = connection.recv()
        except EOFError as error:
            self.close(kill=True)
            raise TrainingError(f"rank {rank} died") from error
        if failed:
            self.close(kill=True)
            raise TrainingError(f"rank {rank} raised:\n{value}")
        return value

    def close(self, kill: bool = False) -> None:
        """End the processes."""
        for connection, process in zip(self._connections, self._processes):
            if kill:
                process.kill()
            else:
                connection.send(None)
            process.join()
            connection.close()
        self._connections, self._processes = [], []
        self._folder.cleanup()

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._processes:
            self.close(kill=kind is not None)


def _serve(connection: Connection) -> None:
    torch.set_num_threads(1)
    while (message := connection.recv()) is not None:
        job, rank, world_size, store, timeout_s, args = message
        try:
            if world_size > 1:
                dist.init_process_group(
                    "gloo",
                    init_method=f"file://{store}",
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=timeout_s),
                )
            answer = (False, job(*args))
        except Exception:  # noqa: BLE001 the parent process raises it
            answer = (True, traceback.format_exc())
        if dist.is_initialized():
            dist.destroy_process_group()
        connection.send(answer)
    os._exit(0)
