"""Small trainings in fp8, each run once however often it is asked for, and what is compared of them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from megatron.checkpoint.formats.native import NativeSource
from tests.e2e.toy_run import newest, toy_args
from tests.harness.faults import run_with_faults
from tests.harness.forked_training import ForkedRun, Program, fork_training

SHAPE = """--hidden-size 32 --seq-length 32 --max-position-embeddings 32 --hidden-dropout 0 --attention-dropout 0 --bf16
    --train-iters 6 --eval-interval 3 --micro-batch-size 2 --fp8-amax-history-len 4 --fp8-amax-compute-algo max"""
RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8")


class Float8Runs:
    """Train in fp8, or in another precision, with more flags; give what was printed, and where the checkpoints are."""

    def __init__(self, folder: Path, precision: str = "--fp8-format hybrid") -> None:
        self._folder, self._precision = folder, precision
        self._done: dict[tuple[str, int, Program], tuple[ForkedRun, Path]] = {}

    def __call__(
        self, flags: str, num_processes: int = 1, program: Program = run_with_faults
    ) -> tuple[ForkedRun, Path]:
        key = (" ".join(flags.split()), num_processes, program)
        if key not in self._done:
            own = self._folder / str(len(self._done))
            own.mkdir()
            words: Sequence[str] = toy_args(own, SHAPE, self._precision, flags)
            run = fork_training(words, num_processes, program=program).check()
            self._done[key] = run, own / "checkpoints"
        return self._done[key]


def losses(run: ForkedRun) -> list[float]:
    """Return the losses of all iterations and evaluations."""
    return [line["lm_loss"] for line in (*run.iterations(), *run.evaluations("validation"))]


def scaling(checkpoints: Path) -> dict[str, torch.Tensor]:
    """Return what delayed scaling remembers at the end of a run."""
    source = NativeSource(newest(checkpoints), with_random_streams=True)
    return {name: source.read(f"float8.{name}") for name in ("amax_history", "expected_amax")}
