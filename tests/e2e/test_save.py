"""Checkpoints while training goes on, on a full disk, and of runs that are killed while they save."""

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
            f"it needs {shard_bytes} bytes, ",
            line,
        )
        assert line.endswith("are free; earlier checkpoints are unchanged")


@pytest.mark.parametrize("how", HOW)
def test_a_run_whose_last_checkpoint_is_not_saved_has_failed(how: str, tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--save-interval 2 --train-iters 10 --eval-interval 100", ONE_MICROBATCH, how)
    run = fork_training(args, faults=Faults(no_room=(9, 100)))
    assert run.statuses == (1,)
    assert run.errors[0].startswith("error: the last checkpoint (iteration 10) was not saved: cannot write ")
    assert "Traceback" not in run.errors[0]
    assert "[after training is done]" in run.stdout
    # What was saved at iteration 8 may still have been on its way.
    assert newest(tmp_path / "checkpoints").name in ("iter_0000008", "iter_0000006" if how else "")
    assert leftovers(tmp_path / "checkpoints") == []
    resumed = fork_training(args).check()
    assert [line["iteration"] for line in resumed.iterations()] == list(range(1, 11))


# More iterations than any run here lives for.
KILLED_FLAGS = "--save-interval 1 --keep-last 3 --train-iters 2000 --lr-decay-iters 60 --eval-interval 25 --bf16"
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
        fork_training_to_death(toy_args(folder, KILLED_FLAGS, flags), num_processes, faults)
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
    run = fork_training(toy_args(killed, KILLED_FLAGS, flags, "--exit-interval 1"), num_processes).check()
    assert loaded_iteration(run) == before
    assert "damaged" not in run.stdout
    assert leftovers(killed / "checkpoints") == []
    assert saved_iterations(killed / "checkpoints") == [i for i in range(before - 1, before + 2) if i > 0]
    last = f"--exit-interval {before + 1} --save-interval 10000"
    uninterrupted = fork_training(toy_args(whole, KILLED_FLAGS, flags, last), num_processes, timeout_s=300.0).check()
    assert exact_figures(run.metrics) == exact_figures(uninterrupted.metrics)
    assert_same_checkpoints(newest(killed / "checkpoints"), newest(whole / "checkpoints"))
