"""A disk that takes no more stops no training, and costs no checkpoint that is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.checkpoint.checkpoint_folder import saved_iterations
from tests.e2e.toy_run import leftovers, newest, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import ForkedRun, fork_training

# One micro-batch an iteration on each of two ranks.
FLAGS = "--save-interval 2 --train-iters 10 --lr-decay-iters 10 --eval-interval 100 --tensor-model-parallel-size 2"
ONE_MICROBATCH = "--micro-batch-size 4"
HOW = [pytest.param("", id="at-once", marks=pytest.mark.long), pytest.param("--async-save", id="async")]


def warnings(run: ForkedRun) -> list[str]:
    return [line for line in run.stdout.splitlines() if line.startswith("WARNING: the checkpoint of iteration")]


@pytest.mark.parametrize("how", HOW)
def test_saves_that_fail_are_said_and_training_goes_on_to_one_that_does_not(how: str, tmp_path: Path) -> None:
    checkpoints = tmp_path / "checkpoints"
    # Without room: from iteration 3 to 6.
    run = fork_training(toy_args(tmp_path, FLAGS, ONE_MICROBATCH, how), 2, Faults(rank=1, no_room=(3, 7))).check()
    assert len(run.iterations()) == 10
    lines = warnings(run)
    failed = [int(line.split()[5]) for line in lines]
    # What is saved meanwhile is written a little later.
    assert failed == [4, 6] or (how and 4 in failed and set(failed) <= {2, 4, 6})
    assert saved_iterations(checkpoints) == [i for i in (2, 4, 6, 8, 10) if i not in failed]
    assert leftovers(checkpoints) == []
    shard_bytes = (checkpoints / "iter_0000008" / "shard_00001.safetensors").stat().st_size
    for line, iteration in zip(lines, failed):
        path = rf"{re.escape(str(checkpoints))}/\.iter_{iteration:07d}\.\w+\.saving/shard_00001\.safetensors"
        assert re.match(
            f"WARNING: the checkpoint of iteration {iteration} was not saved: cannot write {path}: File too large; "
            f"{shard_bytes} bytes are needed for it, ",
            line,
        )
        assert line.endswith("are free; what was saved before is still in place")


@pytest.mark.parametrize("how", HOW)
def test_a_run_whose_last_checkpoint_is_not_saved_has_failed(how: str, tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--save-interval 2 --train-iters 10 --eval-interval 100", ONE_MICROBATCH, how)
    run = fork_training(args, faults=Faults(no_room=(9, 100)))
    assert run.statuses == (1,)
    assert run.errors[0].startswith("error: the last checkpoint, of iteration 10, was not saved: cannot write ")
    assert "Traceback" not in run.errors[0]
    assert "[after training is done]" in run.stdout
    # What was saved at iteration 8 may still have been on its way.
    assert newest(tmp_path / "checkpoints").name in ("iter_0000008", "iter_0000006" if how else "")
    assert leftovers(tmp_path / "checkpoints") == []
    resumed = fork_training(args).check()
    assert [line["iteration"] for line in resumed.iterations()] == list(range(1, 11))
