"""Run the project's commands the way that its users do, and read back what they wrote."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.harness.child_process import ends_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
OUTPUT_TAIL_CHARACTERS = 8000
# What a surrounding torchrun, or a test's own rank, would leak into the command.
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class MetricsReader:
    """Sort the lines of a run's metrics file."""

    metrics: tuple[dict[str, Any], ...]

    def iterations(self) -> list[dict[str, Any]]:
        """Return the metrics of training iterations, in the order in which they were written."""
        return [line for line in self.metrics if "split" not in line]

    def losses(self) -> list[float]:
        """Return the training loss of every iteration."""
        return [line["lm_loss"] for line in self.iterations()]

    def evaluations(self, split: str) -> list[dict[str, Any]]:
        """Return the metrics of the evaluations on ``split``."""
        return [line for line in self.metrics if line.get("split") == split]


@dataclass(frozen=True)
class CommandResult(MetricsReader):
    """Hold what a finished command left: its exit status, what it printed, and its metrics file's lines."""

    command: tuple[str, ...]
    returncode: int
    stdout: str
    stderr: str
    metrics: tuple[dict[str, Any], ...] = ()

    def check(self) -> CommandResult:
        """Return this result, or fail with the end of the command's output if its status is not 0."""
        if self.returncode != 0:
            raise AssertionError(
                f"exit status {self.returncode} from: {' '.join(self.command)}\n"
                f"--- stdout ---\n{self.stdout[-OUTPUT_TAIL_CHARACTERS:]}\n"
                f"--- stderr ---\n{self.stderr[-OUTPUT_TAIL_CHARACTERS:]}"
            )
        return self


def run_command(
    command: Sequence[str | Path],
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    cwd: Path = REPOSITORY,
) -> CommandResult:
    """Run a command to its end on one thread a process; ``env`` is added to the environment.

    Raises:
        AssertionError: the command took longer than ``timeout_s``; it and what it started are ended first.
    """
    words = tuple(str(word) for word in command)
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **(env or {})}
    process = subprocess.Popen(
        words,
        cwd=cwd,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        preexec_fn=ends_with_parent(),
    )
    try:
        stdout, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        stdout, stderr = process.communicate()
        raise AssertionError(
            f"ran past {timeout_s} s: {' '.join(words)}\n"
            f"--- stdout ---\n{stdout[-OUTPUT_TAIL_CHARACTERS:]}\n"
            f"--- stderr ---\n{stderr[-OUTPUT_TAIL_CHARACTERS:]}"
        ) from None
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return CommandResult(words, process.returncode, stdout, stderr)


def launch_prefix(nproc: int) -> list[str]:
    """Return the words that come before the script: plain Python for one process, torchrun for more."""
    if nproc == 1:
        return [sys.executable]
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(nproc)]


def run_training(
    args: Sequence[str | Path],
    nproc: int = 1,
    *,
    env: Mapping[str, str] | None = None,
    timeout_s: float = 120.0,
    cwd: Path = REPOSITORY,
    script: str = "pretrain_gpt.py",
) -> CommandResult:
    """Run ``script`` with ``args`` on ``nproc`` processes and read the metrics file that the arguments name.

    The status is not looked at: call ``check()`` on the result where the run must succeed.

    Raises:
        AssertionError: the run took longer than ``timeout_s``.
    """
    result = run_command([*launch_prefix(nproc), REPOSITORY / script, *args], env=env, timeout_s=timeout_s, cwd=cwd)
    metrics = read_metrics(metrics_path([str(word) for word in args], cwd))
    return CommandResult(result.command, result.returncode, result.stdout, result.stderr, metrics)


def read_metrics(path: Path | None) -> tuple[dict[str, Any], ...]:
    """Return the lines of a metrics file; none where there is no such file."""
    if path is None or not path.exists():
        return ()
    return tuple(json.loads(line) for line in path.read_text().splitlines())


def metrics_path(args: Sequence[str], cwd: Path) -> Path | None:
    """Return where a run with these arguments writes its metrics."""
    values: dict[str, str] = {}
    for position, word in enumerate(args):
        name, has_value, value = word.partition("=")
        if name in ("--save", "--metrics-jsonl"):
            values[name] = value if has_value else args[position + 1]
    if "--metrics-jsonl" in values:
        return cwd / values["--metrics-jsonl"]
    if "--save" in values:
        return cwd / values["--save"] / "metrics.jsonl"
    return None
