"""Checkpoints that are written while training goes on: the same bytes, none lost at the end of a run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.checkpoint.checkpoint_folder import saved_iterations
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, leftovers, newest, toy_args
from tests.harness.faults import Faults
from tests.harness.forked_training import fork_training

CASES = [
    pytest.param(1, "--bf16", id="one-process", marks=pytest.mark.long),
    pytest.param(2, "--use-distributed-optimizer --overlap-param-gather", id="dp2-sharded"),
]


@pytest.mark.parametrize(("num_processes", "flags"), CASES)
def test_an_asynchronous_run_leaves_what_a_synchronous_one_does(num_processes: int, flags: str, tmp_path: Path) -> None:
    folders = {name: tmp_path / name for name in ("at-once", "meanwhile")}
    saving = f"{flags} --save-interval 3 --keep-last 3 --train-iters 14 --lr-decay-iters 20"
    plain = fork_training(toy_args(folders["at-once"], saving), num_processes).check()
    run = fork_training(toy_args(folders["meanwhile"], saving, "--async-save"), num_processes).check()
    assert exact_figures(run.metrics) == exact_figures(plain.metrics)
    for folder in folders.values():
        assert saved_iterations(folder / "checkpoints") == [9, 12, 14]
        assert leftovers(folder / "checkpoints") == []
    for iteration in (9, 12, 14):
        name = f"checkpoints/iter_{iteration:07d}"
        assert_same_checkpoints(folders["meanwhile"] / name, folders["at-once"] / name)
    saved = re.findall(r"successfully saved checkpoint at iteration +(\d+)", run.stdout)
    assert saved == ["3", "6", "9", "12", "14"]


@pytest.mark.default
def test_a_save_that_a_signal_comes_upon_is_finished(tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--save-interval 5 --async-save")
    run = fork_training(args, 2, Faults(rank=1, sigterm_at=6)).check()
    assert "exiting program at iteration 6 after a signal" in run.stdout
    assert newest(tmp_path / "checkpoints").name == "iter_0000006"
    assert saved_iterations(tmp_path / "checkpoints") == [5, 6]
    assert leftovers(tmp_path / "checkpoints") == []


def test_a_save_beside_which_training_fails_is_finished(tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--save-interval 2 --async-save --micro-batch-size 4 --bf16")
    run = fork_training(args, 1, Faults(nan_gradient_at=3))
    assert run.statuses == (1,)
    assert newest(tmp_path / "checkpoints").name == "iter_0000002"
    assert leftovers(tmp_path / "checkpoints") == []
