"""Run a function on several ranks and return what each of them returned."""

from __future__ import annotations

import atexit
import functools
import inspect
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests.harness.job import Job, Outcome, RankError

REPOSITORY = Path(__file__).resolve().parents[2]
# The server enforces a job's limit; past this margin the server itself is taken to be stuck.
SERVER_MARGIN_S = 30.0
LOG_TAIL_CHARACTERS = 4000


class RankFailure(AssertionError):
    """Report that a rank raised, died or ran past the time limit; ``rank`` is the one to look at first."""

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


class ForkServer:
    """Own the process that forks ranks; started by the first job, and anew after a job that broke it.

    ``settings`` are variables of its environment.
    """

    def __init__(self, settings: Mapping[str, str]) -> None:
        self._settings = settings
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def run(self, job: Job) -> Outcome:
        """Run one job to its end; an interrupt on the way ends the ranks and the server."""
        connection = self._start()
        limit_s = job.timeout_s + SERVER_MARGIN_S
        try:
            connection.send(job)
            if not connection.poll(limit_s):
                raise RuntimeError(f"the fork server did not answer within {limit_s} s")
            outcome = connection.recv()
        except BaseException:
            self.close()
            raise
        assert isinstance(outcome, Outcome)
        return outcome

    def close(self) -> None:
        """End the server and any rank that is still running."""
        if self._process is None or self._connection is None:
            return
        self._connection.close()
        try:
            self._process.wait(timeout=10.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process = self._connection = None

    def _start(self) -> Connection:
        """Return the connection to a running server."""
        if self._process is not None and self._process.poll() is not None:
            self.close()
        if self._connection is not None:
            return self._connection
        ours, theirs = Pipe()
        environment = os.environ | {
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(path for path in (str(REPOSITORY), *sys.path) if path),
            **self._settings,
        }
        # Ranks meet over the loopback device: a container's own name often resolves to nothing.
        if sys.platform == "linux":
            environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.harness.fork_server", str(theirs.fileno())],
            cwd=REPOSITORY,
            env=environment,
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            # An interrupt from the keyboard reaches the session only, which then closes the server.
            start_new_session=True,
        )
        theirs.close()
        self._connection = ours
        return ours


@functools.cache
def _server(settings: tuple[tuple[str, str], ...]) -> ForkServer:
    server = ForkServer(dict(settings))
    atexit.register(server.close)
    return server


def run_distributed(
    world_size: int,
    function: Callable[..., Any],
    *args: Any,
    timeout_s: float = 20.0,
    backend: str = "gloo",
    settings: tuple[tuple[str, str], ...] = (),
    **kwargs: Any,
) -> list[Any]:
    """Call ``function(*args, **kwargs)`` on ``world_size`` ranks and return their results in rank order.

    Every rank is a process of its own in which ``torch.distributed`` is initialized before the call and
    destroyed after it; ``RANK``, ``LOCAL_RANK`` and ``WORLD_SIZE`` are set. ``function`` is a module-level
    function of a test file or of the package; its arguments and its result must pickle. ``settings`` are variables
    that must be in the environment before torch is imported: ranks with the same settings are forked from one process.

    Raises:
        RankFailure: a rank raised (the first one's traceback is in the message, and its exception is the
            cause), died, or the job took longer than ``timeout_s`` (the message holds every rank's stacks).
    """
    qualified_name = function.__qualname__
    if not qualified_name.isidentifier():
        raise TypeError(f"{qualified_name} is not a module-level function: ranks find it by file and name")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        job = Job(
            module_name=function.__module__,
            module_path=inspect.getfile(sys.modules[function.__module__]),
            function_name=qualified_name,
            arguments=pickle.dumps((args, kwargs)),
            world_size=world_size,
            backend=backend,
            folder=folder,
            timeout_s=timeout_s,
        )
        outcome = _server(settings).run(job)
        if any(outcome.exit_codes):
            raise _failure(job, outcome)
        return [pickle.loads((Path(folder) / f"rank_{rank}.result").read_bytes()) for rank in range(world_size)]


def _failure(job: Job, outcome: Outcome) -> RankFailure:
    """Build the report of a job that did not succeed on every rank."""
    folder = Path(job.folder)
    errors: dict[int, RankError] = {}
    for rank in range(job.world_size):
        path = folder / f"rank_{rank}.error"
        if path.exists():
            errors[rank] = pickle.loads(path.read_bytes())
    died = [rank for rank, code in enumerate(outcome.exit_codes) if code < 0 and rank not in outcome.ended]
    if died:
        first = died[0]
        reason = f"rank {first} of {job.world_size} died with exit code {outcome.exit_codes[first]}"
        parts = [reason, _stacks_and_log(folder, first)]
    elif errors:
        # A rank that fails makes its peers fail in their collectives: the earliest is the reason.
        first = min(errors, key=lambda rank: errors[rank].raised_at)
        reason = f"rank {first} of {job.world_size} raised"
        parts = [reason, errors[first].traceback_text.rstrip(), _log_tail(folder, first)]
    else:
        first = outcome.ended[0]
        reason = f"ranks {list(outcome.ended)} of {job.world_size} ran past {job.timeout_s} s"
        parts = [reason, _stacks_and_log(folder, first)]
    parts += [_aftermath(folder, rank, outcome, errors) for rank in range(job.world_size) if rank != first]
    failure = RankFailure("\n".join([f"{job.function_name}:", *(part for part in parts if part)]), first)
    exception = errors[first].exception if first in errors else None
    if exception is not None:
        failure.__cause__ = pickle.loads(exception)
    return failure


def _aftermath(folder: Path, rank: int, outcome: Outcome, errors: dict[int, RankError]) -> str:
    """Return what became of a rank that was not the first to fail."""
    if rank in errors:
        return f"rank {rank} raised: {errors[rank].traceback_text.rstrip().splitlines()[-1]}"
    if rank in outcome.ended:
        return f"rank {rank} had to be ended\n{_stacks_and_log(folder, rank)}"
    return ""


def _stacks_and_log(folder: Path, rank: int) -> str:
    path = folder / f"rank_{rank}.stacks"
    stacks = path.read_text(errors="replace").rstrip() if path.exists() else ""
    parts = [f"--- stacks of rank {rank} ---", stacks or "(none were written)", _log_tail(folder, rank)]
    return "\n".join(part for part in parts if part)


def _log_tail(folder: Path, rank: int) -> str:
    path = folder / f"rank_{rank}.log"
    text = path.read_text(errors="replace").rstrip() if path.exists() else ""
    return f"--- output of rank {rank} ---\n{text[-LOG_TAIL_CHARACTERS:]}" if text else ""
