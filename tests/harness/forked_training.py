"""Run whole trainings in ranks forked from a warm process: what a command does, without its start-up.

The command line, the process group over TCP, the files and the printed lines are those of ``pretrain_gpt.py``.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron.training import exit_reason
from tests.harness.distributed import RankFailure, run_distributed
from tests.harness.faults import Faults, run_with_faults
from tests.harness.free_port import free_port
from tests.harness.training_run import MetricsReader, metrics_path, read_metrics

TIMEOUT_S = 90.0
NO_FAULTS = Faults()
Program = Callable[[Sequence[str], Faults], int]


@dataclass(frozen=True)
class ForkedRun(MetricsReader):
    """Hold what a training left: every rank's exit status and output, and the metrics file's lines."""

    statuses: tuple[int, ...]
    outputs: tuple[str, ...]
    errors: tuple[str, ...]
    metrics: tuple[dict[str, Any], ...]

    @property
    def stdout(self) -> str:
        """Return what rank 0 printed."""
        return self.outputs[0]

    def check(self) -> ForkedRun:
        """Return this run, or fail with its output if a rank's status is not 0."""
        if any(self.statuses):
            reports = [
                f"--- rank {rank} ---\n{out[-4000:]}\n{err[-4000:]}"
                for rank, (out, err) in enumerate(zip(self.outputs, self.errors))
            ]
            raise AssertionError("\n".join([f"exit statuses {self.statuses}", *reports]))
        return self


def fork_training(
    args: Sequence[str | Path],
    nproc: int = 1,
    faults: Faults = NO_FAULTS,
    timeout_s: float = TIMEOUT_S,
    program: Program = run_with_faults,
    settings: tuple[tuple[str, str], ...] = (),
) -> ForkedRun:
    """Train with ``args`` on ``nproc`` forked ranks; the statuses are not looked at.

    ``program`` takes the place of ``pretrain_gpt.py`` with faults. ``settings`` are variables that must be in the
    environment before torch is imported.

    Raises:
        RankFailure: a rank died or ran past ``timeout_s``.
    """
    argv = [str(word) for word in args]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_distributed(
            *(nproc, _train_rank, argv, faults, folder, free_port(), program), timeout_s=timeout_s, settings=settings
        )
    statuses, outputs, errors = zip(*ranks)
    return ForkedRun(statuses, outputs, errors, read_metrics(metrics_path(argv, Path.cwd())))


def fork_training_to_death(args: Sequence[str | Path], nproc: int, faults: Faults) -> None:
    """Train until the kill that ``faults`` asks for; fail if the run ends in any other way."""
    try:
        run = fork_training(args, nproc, faults)
    except RankFailure as failure:
        if "died with exit code -9" not in str(failure):
            raise
        return
    run.check()
    raise AssertionError("the run ended before it was killed")


def fork_trainings(several: Sequence[Sequence[str | Path]], nproc: int) -> list[ForkedRun]:
    """Train with each of several command lines at the same time, each on ``nproc`` forked ranks of its own."""
    argvs = [[str(word) for word in args] for args in several]
    ports = [free_port() for _ in argvs]
    with tempfile.TemporaryDirectory() as folder:
        ranks = run_distributed(nproc * len(argvs), _train_one_of, argvs, folder, ports, nproc, timeout_s=TIMEOUT_S)
    runs = []
    for number, argv in enumerate(argvs):
        statuses, outputs, errors = zip(*ranks[number * nproc : (number + 1) * nproc])
        runs.append(ForkedRun(statuses, outputs, errors, read_metrics(metrics_path(argv, Path.cwd()))))
    return runs


def _train_one_of(argvs: list[list[str]], folder: str, ports: list[int], nproc: int) -> tuple[int, str, str]:
    number, rank = divmod(dist.get_rank(), nproc)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(nproc))
    return _train_rank(argvs[number], NO_FAULTS, folder, ports[number])


def _train_rank(
    argv: list[str], faults: Faults, folder: str, port: int, program: Program = run_with_faults
) -> tuple[int, str, str]:
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # gloo takes a peer that leaves while others still connect to it for a crash.
    dist.barrier()
    dist.destroy_process_group()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), MEGATRON_DEVICE="cpu")
    # Ranks that fail wait for a launcher to end them; here is none.
    exit_reason._WAIT_FOR_REPORT_S = 1.0
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(_Tee(out, sys.stdout)), contextlib.redirect_stderr(_Tee(err, sys.stderr)):
        try:
            status = program(argv, faults)
        except SystemExit as ending:
            status = int(ending.code or 0)
    readers = [thread.name for thread in threading.enumerate() if thread.name.startswith("batch reader")]
    assert not readers, f"a run that has ended still reads: {readers}"
    if dist.is_initialized():
        dist.destroy_process_group()
    # The harness expects the group that it made.
    dist.init_process_group("gloo", init_method=f"file://{folder}/after", rank=rank, world_size=world_size)
    return status, out.getvalue(), err.getvalue()


class _Tee(io.TextIOBase):
    """Write to a buffer and to the log of the rank, which is shown when it dies or hangs."""

    def __init__(self, *streams: Any) -> None:
        self._streams = streams

    def write(self, text: str) -> int:
        for stream in self._streams:
            stream.write(text)
        return len(text)

    def flush(self) -> None:
        for stream in self._streams:
            stream.flush()
