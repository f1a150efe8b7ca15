"""Worker processes of a tensor-parallel model that a plain Python program starts: requests, replies, errors, end."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron.checkpoint.formats.huggingface.model_export import write_hugging_face
from megatron.checkpoint.formats.huggingface.source import LoadedModel, LoadedModelSource
from megatron.core.console import SIGN_OF_LIFE_S, format_duration, print_line
from megatron.core.device import Device
from megatron.core.errors import ConfigurationError, MegatronError

_PROJECT = Path(__file__).resolve().parents[4]
_WORKER = f"{__package__}.tp_worker"
_TIME_TO_END_S = 10.0
_TIME_TO_DIE_S = 1.0
_LOOK_EVERY_S = 0.05
_STARTING = "to import torch"
ENDED = "the model's processes have ended; call parallelize again"


@dataclass(frozen=True)
class Reply:
    """Reply of a rank: JSON values, and the bytes that follow them."""

    values: Mapping[str, Any]
    payload: bytes


class WorkerPool:
    """Worker processes, one per tensor-parallel rank, that hold a model.

    ``model`` is a folder or a loaded model, whose weights are written to a temporary folder until all processes have
    read them. The processes meet at ``master``, by default in a file. They end at `close`, when this object is garbage
    collected, and when this program ends in any way.

    Raises:
        ConfigurationError: a process cannot load its shard.
        MegatronError: a process failed.
    """

    def __init__(
        self,
        model: str | Path | LoadedModel,
        num_processes: int,
        params_dtype: str | None = None,
        master: tuple[str, int] | None = None,
    ) -> None:
        self._replies: dict[int, Reply] = {}
        self._phases = [_STARTING] * num_processes
        self._is_waiting = False
        self._workers: list[subprocess.Popen[bytes]] = []
        with tempfile.TemporaryDirectory(prefix="parallelize-") as place:
            folder = Path(place) / "model"
            if isinstance(model, str | Path):
                folder = Path(model)
            else:
                write_hugging_face(LoadedModelSource(model), folder)
            meeting = f"file://{place}/meeting" if master is None else f"tcp://{master[0]}:{master[1]}"
            job = {"folder": str(folder), "meeting": meeting, "size": num_processes, "dtype": params_dtype}
            job["run"] = uuid.uuid4().hex
            try:
                for rank in range(num_processes):
                    self._workers.append(_start(job | {"rank": rank, "parent": os.getpid()}))
                self._unread = [bytearray() for _ in self._workers]
                self._collect()
            except BaseException:
                _kill(self._workers)
                raise
            shutil.rmtree(Path(place) / "model", ignore_errors=True)
        self._finalizer = weakref.finalize(self, _end, self._workers)

    def ask(self, request: Mapping[str, Any]) -> list[Reply]:
        """Send a request to every rank and return their replies in the order of the ranks.

        Raises:
            ConfigurationError: the ranks reject the request, or have ended.
            MegatronError: a process failed; all are then ended.
        """
        if not self._finalizer.alive:
            raise ConfigurationError(ENDED)
        try:
            if self._is_waiting:  # the program was interrupted (Ctrl-C) while the ranks computed, and continues
                self._collect()
            self._send(json.dumps(request).encode() + b"\n")
            replies = self._collect()
        except MegatronError:
            self.kill()
            raise
        if "error" in replies[0].values:
            raise ConfigurationError(replies[0].values["error"])
        return replies

    def close(self) -> None:
        """End the processes."""
        self._finalizer()

    def kill(self) -> None:
        """End the processes at once, in the middle of a request."""
        self._finalizer.detach()
        _kill(self._workers)

    def _send(self, line: bytes) -> None:
        self._is_waiting = True
        try:
            for worker in self._workers:
                with contextlib.suppress(BrokenPipeError):  # the end of a process is detected while waiting for replies
                    _pipe(worker.stdin).write(line)
                    _pipe(worker.stdin).flush()
        except BaseException:  # a rank that has only a part of a request cannot take another
            self.kill()
            raise

    def _collect(self) -> list[Reply]:
        """Wait until every rank has replied, or a process has failed; say every 10 s for what."""
        ranks = {_pipe(worker.stdout).fileno(): rank for rank, worker in enumerate(self._workers)}
        since = time.monotonic()
        told = since
        while len(self._replies) < len(ranks):
            ready, _, _ = select.select(list(ranks), [], [], max(told + SIGN_OF_LIFE_S - time.monotonic(), 0.0))
            if not ready:
                told = time.monotonic()
                print_line(f"parallelize: {self._describe_wait(told - since)}", sys.stderr)
            ended = []
            for output in ready:
                read = os.read(output, 1 << 20)
                self._unread[ranks[output]] += read
                if not read:
                    ended.append(ranks[output])
            new = [rank for rank, unread in enumerate(self._unread) if self._take_reply(rank, unread)]
            if dead := [rank for rank in ended if rank not in self._replies]:
                raise MegatronError(self._describe_end(dead[0]))
            for rank in new:
                values = self._replies[rank].values
                if "rejection" in values:
                    raise ConfigurationError(values["rejection"])
                if "failure" in values:
                    raise MegatronError(self._describe_failure(rank, values["failure"]))
        replies = [self._replies[rank] for rank in range(len(ranks))]
        self._replies.clear()
        self._is_waiting = False
        return replies

    def _take_reply(self, rank: int, unread: bytearray) -> bool:
        """Move a whole reply from the bytes that a rank has written to the replies, and note what it starts to do."""
        while True:
            end = unread.find(b"\n") + 1
            if end == 0:
                return False
            values = json.loads(unread[:end])
            if "phase" not in values:
                break
            self._phases[rank] = values["phase"]
            del unread[:end]
        whole = end + values["num_bytes"]
        if len(unread) < whole:
            return False
        self._replies[rank] = Reply(values, bytes(unread[end:whole]))
        del unread[:whole]
        return True

    def _describe_wait(self, seconds: float) -> str:
        """Return what the processes that have not replied do, and for how long this program has waited for them."""
        waited = [
            f"{self._name(rank)} (pid {worker.pid}) {self._phases[rank]}"
            for rank, worker in enumerate(self._workers)
            if rank not in self._replies
        ]
        return f"waiting for {', '.join(waited)}; {format_duration(seconds)}"

    def _describe_failure(self, rank: int, failure: str) -> str:
        """Describe a rank's failure, or its cause: a killed process, whose end may be seen after the failure."""
        end = time.monotonic() + _TIME_TO_DIE_S
        while time.monotonic() < end:
            for other, worker in enumerate(self._workers):
                if (worker.poll() or 0) < 0:
                    return self._describe_end(other)
            time.sleep(_LOOK_EVERY_S)
        return f"{self._name(rank)} failed: {failure}; call parallelize again"

    def _describe_end(self, rank: int) -> str:
        status = self._workers[rank].wait()
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        return f"{self._name(rank)} {how}; call parallelize again"

    def _name(self, rank: int) -> str:
        return f"process {rank} of {len(self._workers)}"


def memory_of(device: Device, rank: int, detailed: bool = False) -> dict[str, Any]:
    """Return the memory in bytes that this process uses on its device; if ``detailed``, also several lines about it."""
    use = device.memory_use()
    numbers = {"allocated": int(use.allocated * 2**20), "reserved": int(use.reserved * 2**20)}
    return {"device": f"{device.kind}:{rank}", **numbers, "summary": device.memory_summary() if detailed else ""}


def memory_report(processes: Sequence[Mapping[str, Any]]) -> str:
    """Format what `memory_of` returned in each process: a line each, after the summary if there is one."""
    lines = []
    for values in processes:
        kind, rank = values["device"].split(":")
        lines += [values["summary"], ""] if values["summary"] else []
        lines.append(f"{'GPU' if kind == 'cuda' else 'CPU'}:{rank} => {values['allocated'] / 1e9:.2f}GB")
    return "\n".join(lines)


def _start(job: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    # Ctrl-C is for the program: it ends the workers with itself, or continues.
    program = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        f"sys.path.insert(0, {str(_PROJECT)!r}); from {_WORKER} import main; sys.exit(main(sys.argv[1]))"
    )
    command = [sys.executable, "-c", program, json.dumps(job)]
    environment = dict(os.environ)
    if sys.platform == "linux":
        # All processes are on this node. By default gloo looks up its name for every group, which can take minutes.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)


def _end(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    """Close the processes' standard input, and kill those that do not end in time."""
    for worker in workers:
        with contextlib.suppress(BrokenPipeError):
            _pipe(worker.stdin).close()
    for worker in workers:
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.wait(_TIME_TO_END_S)
    _kill(workers)


def _kill(workers: Sequence[subprocess.Popen[bytes]]) -> None:
    for worker in workers:
        worker.kill()
    for worker in workers:
        worker.wait()
        with contextlib.suppress(BrokenPipeError):
            _pipe(worker.stdin).close()
        _pipe(worker.stdout).close()


def _pipe(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream
