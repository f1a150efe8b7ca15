"""Fork rank processes from one process that has already imported torch.

Run as ``python -m tests.harness.fork_server FD``; the test session talks to it over the connection with that
file descriptor. It handles one job at a time: it forks the ranks, watches them, and on a failure or at the
time limit asks every rank for its stacks and ends them all. Forking from here takes hundredths of a second
where a fresh interpreter that imports torch takes one to two.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib.util
import os
import pickle
import signal
import sys
import time
import traceback
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType

# A fork that follows multi-threaded work in the parent can hang for good, so torch gets one thread, before
# it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

import torch
import torch.distributed as dist
import torch.utils.checkpoint
import torch.utils.tensorboard

from tests.harness.job import Job, Outcome, describe_error

POLL_INTERVAL_S = 0.005
# Ranks that lose a peer see it within moments; one that does not is stuck and is ended.
GRACE_AFTER_FAILURE_S = 1.0
STACK_DUMP_WAIT_S = 0.3


@dataclass
class _Ranks:
    """Track the forked processes of one job."""

    pids: list[int] = field(default_factory=list)
    exit_codes: dict[int, int] = field(default_factory=dict)

    def reap(self) -> None:
        """Collect the exit codes of ranks that have ended."""
        for rank, pid in enumerate(self.pids):
            if rank not in self.exit_codes:
                done, status = os.waitpid(pid, os.WNOHANG)
                if done:
                    self.exit_codes[rank] = os.waitstatus_to_exitcode(status)

    @property
    def running(self) -> list[int]:
        """Return the ranks that have not been collected."""
        return [rank for rank in range(len(self.pids)) if rank not in self.exit_codes]

    @property
    def any_failed(self) -> bool:
        """Return whether a collected rank ended with a failure."""
        return any(self.exit_codes.values())

    def dump_stacks(self) -> None:
        """Ask every running rank for the stacks of its threads, and give it time to write them."""
        for rank in self.running:
            os.kill(self.pids[rank], signal.SIGUSR1)
        time.sleep(STACK_DUMP_WAIT_S)

    def kill(self) -> None:
        """End every running rank together with the processes that it started."""
        for rank in self.running:
            # A rank that has just been forked may not lead its own process group yet.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pids[rank], signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGKILL)
        for rank in self.running:
            _, status = os.waitpid(self.pids[rank], 0)
            self.exit_codes[rank] = os.waitstatus_to_exitcode(status)


def warm_up() -> None:
    """Load what a first training step loads lazily, so that no rank has to.

    A backward pass and an optimizer step import a good part of torch on their first call. Everything here
    runs on the calling thread: no worker thread may exist when ranks are forked.
    """
    torch.set_num_threads(1)
    if torch.cuda.is_available():
        return  # autograd has a thread for every device, from the first backward pass on
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def load_module(name: str, path: str) -> ModuleType:
    """Return the module at ``path`` under ``name``, so that its pickles resolve in the test session."""
    loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python module")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def write_whole(path: Path, payload: bytes) -> None:
    """Write a file that is either absent or complete."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(payload)
    partial.replace(path)


def _run_function(job: Job, rank: int) -> bytes:
    dist.init_process_group(
        job.backend,
        init_method=f"file://{job.folder}/rendezvous",
        rank=rank,
        world_size=job.world_size,
        # Later than the job's own limit: its report shows the stack of every rank, gloo's shows one.
        timeout=timedelta(seconds=job.timeout_s + 10.0),
    )
    args, kwargs = pickle.loads(job.arguments)
    result = getattr(load_module(job.module_name, job.module_path), job.function_name)(*args, **kwargs)
    payload = pickle.dumps(result)
    # gloo takes a peer that leaves while others still connect to it for a crash.
    dist.barrier()
    dist.destroy_process_group()
    return payload


def rank_main(job: Job, rank: int) -> int:
    """Run the job's function as ``rank`` in this forked process and return the process's exit status."""
    os.setsid()
    folder = Path(job.folder)
    log = os.open(folder / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    stacks = open(folder / f"rank_{rank}.stacks", "w")  # noqa: SIM115 - stays open until the process ends
    faulthandler.enable(stacks)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(job.world_size))
    try:
        write_whole(folder / f"rank_{rank}.result", _run_function(job, rank))
    except BaseException as error:  # noqa: BLE001 - reported to the test session, which raises it
        report = describe_error(time.monotonic(), traceback.format_exc(), error)
        write_whole(folder / f"rank_{rank}.error", pickle.dumps(report))
        return 1
    return 0


def fork_ranks(job: Job) -> _Ranks:
    """Fork one process per rank; the children never return from here."""
    ranks = _Ranks()
    for rank in range(job.world_size):
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                status = rank_main(job, rank)
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                # Skips the interpreter's shutdown: threads of gloo may still stand in a collective.
                os._exit(status)
        ranks.pids.append(pid)
    return ranks


def supervise(job: Job, ranks: _Ranks, connection: Connection) -> Outcome:
    """Wait for every rank, ending them when one fails, the time is up or the session goes away."""
    deadline = time.monotonic() + job.timeout_s
    failed = False
    ended: tuple[int, ...] = ()
    while True:
        ranks.reap()
        if not ranks.running:
            break
        if ranks.any_failed and not failed:
            failed = True
            deadline = min(deadline, time.monotonic() + GRACE_AFTER_FAILURE_S)
        if time.monotonic() > deadline:
            ended = tuple(ranks.running)
            ranks.dump_stacks()
            ranks.kill()
            break
        if connection.poll(POLL_INTERVAL_S):
            # The session sends nothing during a job, so this is the end of the connection.
            ranks.kill()
            raise EOFError("the test session went away")
    exit_codes = tuple(ranks.exit_codes[rank] for rank in range(job.world_size))
    return Outcome(exit_codes, ended)


def serve(connection: Connection) -> None:
    """Run jobs until the session closes the connection."""
    warm_up()
    while True:
        try:
            job = connection.recv()
        except EOFError:
            return
        try:
            # Imported once here rather than by every rank; the ranks report what goes wrong with it.
            with contextlib.suppress(Exception):
                load_module(job.module_name, job.module_path)
            connection.send(supervise(job, fork_ranks(job), connection))
        except EOFError:
            return


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
