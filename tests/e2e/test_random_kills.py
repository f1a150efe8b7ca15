"""A run that is killed at any moment while it saves goes on from its newest complete checkpoint."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import pytest

from megatron.checkpoint.checkpoint_folder import saved_iterations
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, leftovers, newest, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import ForkedRun, fork_training, fork_training_to_death

# More iterations than any run here lives for.
FLAGS = "--save-interval 1 --keep-last 3 --train-iters 2000 --lr-decay-iters 60 --eval-interval 25 --bf16"
LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d+)")


def newest_complete(checkpoints: Path) -> int:
    """Return the newest iteration with a folder of its name, which a save gives only to a complete checkpoint."""
    return max(saved_iterations(checkpoints), default=0) if checkpoints.exists() else 0


def loaded_iteration(run: ForkedRun) -> int:
    match = LOADED.search(run.stdout)
    return int(match.group(1)) if match else 0


def superseded_iterations(folder: Path) -> list[int]:
    """Return the iterations whose figures restarts took back, for they lay beyond the checkpoint that was loaded."""
    path = folder / "metrics.jsonl.superseded"
    lines = path.read_text().splitlines() if path.exists() else []
    # A line that a kill tore says nothing.
    return [json.loads(line)["iteration"] for line in lines if line.endswith("}")]


def kill_again_and_again(folder: Path, num_kills: int, num_processes: int, flags: str) -> None:
    """Start a run and kill one of its ranks, again and again, at random times after its first micro-batch.

    Every start but the first must resume from the newest complete checkpoint.
    """
    checkpoints = folder / "checkpoints"
    rng = random.Random(f"{num_kills} {flags}")
    for _ in range(num_kills):
        before, taken_back = newest_complete(checkpoints), len(superseded_iterations(checkpoints))
        faults = Faults(kill_after_s=rng.uniform(0.0, 1.0), kill_rank=rng.randrange(num_processes))
        fork_training_to_death(toy_args(folder, FLAGS, flags), num_processes, faults)
        assert newest_complete(checkpoints) >= before
        assert all(iteration > before for iteration in superseded_iterations(checkpoints)[taken_back:])


SHARDED = "--use-distributed-optimizer --overlap-param-gather"
TP_2 = "--tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("num_processes", "flags", "num_kills"),
    [
        pytest.param(1, "", 2, id="one-process", marks=pytest.mark.long),
        pytest.param(1, "--async-save", 3, id="one-process-async", marks=pytest.mark.long),
        pytest.param(2, f"{SHARDED} --async-save", 2, id="dp2-async"),
        pytest.param(1, "", 50, id="one-process-50-times", marks=pytest.mark.long),
        pytest.param(1, "--async-save", 50, id="one-process-async-50-times", marks=pytest.mark.long),
        pytest.param(2, TP_2, 50, id="tp2-50-times", marks=pytest.mark.long),
        pytest.param(2, f"{TP_2} --async-save", 50, id="tp2-async-50-times", marks=pytest.mark.long),
        pytest.param(2, SHARDED, 50, id="dp2-50-times", marks=pytest.mark.long),
        pytest.param(2, f"{SHARDED} --async-save", 50, id="dp2-async-50-times", marks=pytest.mark.long),
    ],
)
def test_killed_run_goes_on(num_processes: int, flags: str, num_kills: int, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill_again_and_again(killed, num_kills, num_processes, flags)
    before = newest_complete(killed / "checkpoints")
    run = fork_training(toy_args(killed, FLAGS, flags, "--exit-interval 1"), num_processes).check()
    assert loaded_iteration(run) == before
    assert "damaged" not in run.stdout
    assert leftovers(killed / "checkpoints") == []
    assert saved_iterations(killed / "checkpoints") == [i for i in range(before - 1, before + 2) if i > 0]
    last = f"--exit-interval {before + 1} --save-interval 10000"
    uninterrupted = fork_training(toy_args(whole, FLAGS, flags, last), num_processes, timeout_s=300.0).check()
    assert exact_figures(run.metrics) == exact_figures(uninterrupted.metrics)
    assert_same_checkpoints(newest(killed / "checkpoints"), newest(whole / "checkpoints"))
