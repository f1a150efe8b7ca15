"""A run that is killed at any moment while it saves goes on from its newest complete checkpoint."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from megatron.training.checkpoint_folders import saved_iterations
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, leftovers, newest, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import ForkedRun, fork_training, fork_training_to_death

# More iterations than any run here lives for.
FLAGS = "--save-interval 1 --keep-last 3 --train-iters 2000 --lr-decay-iters 60 --eval-interval 25 --bf16"
LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d+)")


def newest_complete(checkpoints: Path) -> int:
    """Return the newest iteration with a folder of its name, which a save gives only to a complete checkpoint."""
    return max(saved_iterations(checkpoints), default=0)


def loaded_iteration(run: ForkedRun) -> int:
    match = LOADED.search(run.stdout)
    return int(match.group(1)) if match else 0


def kill_again_and_again(folder: Path, num_kills: int, num_processes: int, layout: str) -> None:
    """Start a run and kill it, again and again, at random times after its first micro-batch."""
    checkpoints = folder / "checkpoints"
    rng = random.Random(num_kills)
    for _ in range(num_kills):
        before = newest_complete(checkpoints) if checkpoints.exists() else 0
        faults = Faults(kill_after_s=rng.uniform(0.0, 1.0))
        fork_training_to_death(toy_args(folder, FLAGS, layout), num_processes, faults)
        assert newest_complete(checkpoints) >= before


@pytest.mark.parametrize(
    ("num_processes", "layout", "num_kills"),
    [
        pytest.param(1, "", 6, id="one-process"),
        pytest.param(2, "--tensor-model-parallel-size 2", 3, id="tp2"),
        pytest.param(1, "", 50, id="one-process-50-times", marks=pytest.mark.long),
        pytest.param(2, "--tensor-model-parallel-size 2", 50, id="tp2-50-times", marks=pytest.mark.long),
        pytest.param(2, "", 50, id="dp2-50-times", marks=pytest.mark.long),
    ],
)
def test_killed_run_goes_on(num_processes: int, layout: str, num_kills: int, tmp_path: Path) -> None:
    killed, whole = tmp_path / "killed", tmp_path / "whole"
    kill_again_and_again(killed, num_kills, num_processes, layout)
    before = newest_complete(killed / "checkpoints")
    run = fork_training(toy_args(killed, FLAGS, layout, "--exit-interval 1"), num_processes).check()
    assert loaded_iteration(run) == before
    assert leftovers(killed / "checkpoints") == []
    assert saved_iterations(killed / "checkpoints") == [i for i in range(before - 1, before + 2) if i > 0]
    last = f"--exit-interval {before + 1} --save-interval 10000"
    uninterrupted = fork_training(toy_args(whole, FLAGS, layout, last), num_processes, timeout_s=300.0).check()
    assert exact_figures(run.metrics) == exact_figures(uninterrupted.metrics)
    assert_same_checkpoints(newest(killed / "checkpoints"), newest(whole / "checkpoints"))
