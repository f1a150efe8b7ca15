"""A run that a scheduler warns ends with a complete checkpoint, and says early where the warning is too short."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from megatron.core.dist_checkpointing import shard_file
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, leftovers, newest, toy_args
from tests.harness.faults import Faults, run_with_faults
from tests.harness.forked_training import fork_training

SAVE_S = 1.2


def run_on_a_slow_disk(argv: list[str], faults: Faults) -> int:
    """Train where a checkpoint takes more than a second."""
    real = shard_file.write_shard

    def write(path, entries):
        time.sleep(SAVE_S)
        return real(path, entries)

    shard_file.write_shard = write
    try:
        return run_with_faults(argv, faults)
    finally:
        shard_file.write_shard = real


def warnings(output: str) -> list[str]:
    return [line for line in output.splitlines() if "--exit-warning-seconds" in line and line.startswith("WARNING")]


@pytest.mark.default
@pytest.mark.parametrize("how", [pytest.param("", marks=pytest.mark.long), "--async-save"])
def test_a_warning_that_is_too_short_is_said_after_the_first_checkpoint(how: str, tmp_path: Path) -> None:
    flags = "--save-interval 2 --train-iters 6 --lr-decay-iters 20 --eval-interval 100 --micro-batch-size 4"
    args = toy_args(tmp_path, flags, how)
    run = fork_training([*args, "--exit-warning-seconds", "1"], program=run_on_a_slow_disk).check()
    line = warnings(run.stdout)[0]
    assert re.search(r" \d+\.\d s for a checkpoint", line)
    if not how:
        before = run.stdout[: run.stdout.index(line)]
        assert "saved checkpoint at iteration       2 " in before
        assert "iteration        3/" not in before
    enough = fork_training([*args, "--exit-warning-seconds", "90", "--train-iters", "8"], program=run_on_a_slow_disk)
    assert warnings(enough.check().stdout) == []


@pytest.mark.long
def test_a_signal_at_an_evaluation_saves_first_and_later_evaluations_are_the_same(tmp_path: Path) -> None:
    flags = "--eval-interval 5 --save-interval 100 --hidden-dropout 0.1"
    whole = fork_training(toy_args(tmp_path / "whole", flags), 2).check()
    args = toy_args(tmp_path / "ours", flags, "--exit-warning-seconds 60")
    ended = fork_training(args, 2, Faults(rank=1, sigterm_at=10)).check()
    assert "no evaluation at iteration 10: the run is ending after a signal" in ended.stdout
    assert ended.stdout.index("no evaluation at iteration 10") < ended.stdout.index(
        "saving checkpoint at iteration      10"
    )
    assert newest(tmp_path / "ours" / "checkpoints").name == "iter_0000010"
    resumed = fork_training(args, 2).check()
    expected = [figures for figures in exact_figures(whole.metrics) if figures[:2] != (10, "validation")]
    assert exact_figures(resumed.metrics) == expected
    assert leftovers(tmp_path / "ours" / "checkpoints") == []
    last = "checkpoints/iter_0000020"
    assert_same_checkpoints(tmp_path / "ours" / last, tmp_path / "whole" / last)
