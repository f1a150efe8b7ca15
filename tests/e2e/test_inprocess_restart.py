"""Ranks that are killed are replaced under a launcher that goes on, and the losses are those of a run without kills."""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.verification.faults.launch import Launch
from tests.e2e.toy_run import assert_same_checkpoints, exact_figures, leftovers, newest, toy_args
from tests.harness.forked_training import fork_training
from tests.harness.training_run import REPOSITORY, launch_prefix, read_metrics

PATIENCE_S = 300.0
RESTARTED = "all ranks have joined again"
COPIES = "--non-persistent-save-interval 1 --replication"
LAYOUTS = {
    "tp2_dp2": "--tensor-model-parallel-size 2 --use-distributed-optimizer --async-save",
    "pp2_dp2": "--pipeline-model-parallel-size 2",
    "pp2_dp2_copies": f"--pipeline-model-parallel-size 2 --bf16 {COPIES}",
    "dp4_bf16": "--use-distributed-optimizer --overlap-grad-reduce --bf16",
}


class Run:
    """Run a small training with restarts in a folder of its own."""

    def __init__(self, folder: Path, nproc: int, *flags: str) -> None:
        self.checkpoints = folder / "checkpoints"
        args = toy_args(folder, "--inprocess-restart --eval-interval 1000 --keep-last 2", *flags)
        command = [*launch_prefix(nproc), str(REPOSITORY / "pretrain_gpt.py"), *args]
        folder.mkdir()
        self.launch = Launch(command, folder / "output.txt", self.checkpoints / "metrics.jsonl")

    def wait_for(self, text: str, count: int = 1) -> None:
        """Wait until the output holds ``text`` so many times."""
        deadline = time.monotonic() + PATIENCE_S
        while self.launch.text.count(text) < count:
            assert self.launch.look() is None, self.launch.text[-4000:]
            assert time.monotonic() < deadline, self.launch.text[-4000:]
            time.sleep(0.02)

    def wait_for_an_iteration(self, restarts: int) -> None:
        """Wait until the ranks have met so many times again, and done an iteration since."""
        if restarts:
            self.wait_for(RESTARTED, restarts)
        deadline = time.monotonic() + PATIENCE_S
        while "elapsed time per iteration" not in self.launch.text.rpartition(RESTARTED)[2]:
            assert self.launch.look() is None, self.launch.text[-4000:]
            assert time.monotonic() < deadline, self.launch.text[-4000:]
            time.sleep(0.1)

    def kill(self, rank: int, number: int = signal.SIGKILL) -> None:
        """Send a rank a signal that it cannot answer, as soon as there is one."""
        deadline = time.monotonic() + PATIENCE_S
        while (process := self.launch.ranks().get(rank)) is None:
            assert time.monotonic() < deadline, self.launch.text[-4000:]
            time.sleep(0.02)
        os.kill(process, number)

    def figures(self) -> list[tuple[object, ...]]:
        """Return what two runs have in common, after the end of this one."""
        assert self.launch.wait(PATIENCE_S) == 0, self.launch.text[-6000:]
        assert [name for name in leftovers(self.checkpoints) if not name.startswith("hang-")] == []
        return exact_figures(read_metrics(self.checkpoints / "metrics.jsonl"))


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Run]]:
    """Yield a list of runs that are ended after the test."""
    for name, value in (("OMP_NUM_THREADS", "1"), ("PYTHONUNBUFFERED", "1"), ("MEGATRON_DEVICE", "cpu")):
        monkeypatch.setenv(name, value)
    started: list[Run] = []
    yield started
    for run in started:
        run.launch.close()


def start(runs: list[Run], folder: Path, nproc: int, *flags: str) -> Run:
    runs.append(Run(folder, nproc, *flags))
    return runs[-1]


def assert_like_a_quiet_run(folder: Path, nproc: int, flags: str, attacked: Run) -> None:
    """Assert that a run's figures and last checkpoint are, bit for bit, those of one that nothing befell."""
    figures = attacked.figures()
    args = toy_args(folder, "--eval-interval 1000 --keep-last 2", flags.replace(COPIES, ""))
    quiet = fork_training(args, nproc=nproc, timeout_s=PATIENCE_S).check()
    assert figures == exact_figures(quiet.metrics)
    assert_same_checkpoints(newest(attacked.checkpoints), newest(folder / "checkpoints"))


@pytest.mark.full
def test_a_killed_rank_is_replaced_and_the_figures_stay(tmp_path: Path, runs: list[Run]) -> None:
    flags = "--train-iters 60 --lr-decay-iters 60 --save-interval 10 --use-distributed-optimizer"
    attacked = start(runs, tmp_path / "attacked", 2, flags, COPIES)
    attacked.wait_for("iteration       14/")
    before = attacked.launch.ranks()
    reached = attacked.launch.iteration()
    attacked.kill(0)
    attacked.wait_for("resuming from the copies in memory")
    after = attacked.launch.ranks()
    match = re.search(r"resuming from the copies in memory, at iteration (\d+)", attacked.launch.text)
    assert match is not None
    assert int(match.group(1)) >= reached - 1
    # The other rank has kept its process.
    assert (before[0] == after[0], before[1] == after[1]) == (False, True)
    assert_like_a_quiet_run(tmp_path / "quiet", 2, flags, attacked)


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_rank_of_four_is_killed_every_few_seconds(tmp_path: Path, runs: list[Run], layout: str) -> None:
    flags = f"--train-iters 150 --lr-decay-iters 150 --global-batch-size 8 --save-interval 10 {LAYOUTS[layout]}"
    attacked = start(runs, tmp_path / "attacked", 4, flags)
    rng = random.Random(len(layout))
    for kills in range(1, 6):
        before = attacked.launch.iteration()
        while attacked.launch.iteration() < before + 15:
            assert attacked.launch.look() is None, attacked.launch.text[-4000:]
            time.sleep(0.02)
        time.sleep(rng.uniform(0.0, 2.0))
        attacked.kill(rng.randrange(4))
        attacked.wait_for(RESTARTED, kills)
    assert_like_a_quiet_run(tmp_path / "quiet", 4, flags, attacked)


@pytest.mark.long
def test_a_rank_is_killed_every_thirty_seconds_for_twenty_minutes(tmp_path: Path, runs: list[Run]) -> None:
    flags = "--lr-decay-iters 400 --global-batch-size 8 --save-interval 25 --use-distributed-optimizer --log-interval 1"
    flags += " --train-iters 1000000"  # the order of samples depends on it
    attacked = start(runs, tmp_path / "attacked", 4, flags, "--exit-duration-in-mins 21")
    rng = random.Random(2)
    end = time.monotonic() + 20 * 60.0
    kills = 0
    while time.monotonic() < end:
        time.sleep(30.0)
        attacked.wait_for_an_iteration(kills)  # on a busy machine a restart may take longer
        attacked.kill(rng.randrange(4))
        kills += 1
    figures = attacked.figures()
    assert attacked.launch.text.count(RESTARTED) == kills
    last = figures[-1][0]
    print(f"{kills} kills, {last} iterations")
    args = toy_args(tmp_path / "quiet", "--eval-interval 1000 --keep-last 2", flags, f"--exit-interval {last}")
    quiet = fork_training(args, nproc=4, timeout_s=3600.0).check()
    assert figures == exact_figures(quiet.metrics)


@pytest.mark.long
def test_a_rank_that_hangs_is_reported_and_all_are_replaced(tmp_path: Path, runs: list[Run]) -> None:
    flags = "--train-iters 100 --lr-decay-iters 100 --save-interval 10 --hang-timeout-seconds 3"
    attacked = start(runs, tmp_path / "attacked", 2, flags)
    attacked.wait_for("successfully saved checkpoint at iteration      20 ")
    attacked.kill(1, signal.SIGSTOP)
    attacked.wait_for(RESTARTED)
    assert "HANG" in attacked.launch.text
    assert_like_a_quiet_run(tmp_path / "quiet", 2, flags, attacked)


@pytest.mark.long
def test_nobody_outlives_a_killed_launcher(tmp_path: Path, runs: list[Run]) -> None:
    run = start(runs, tmp_path / "killed", 2, "--train-iters 100000 --save-interval 10")
    run.wait_for("successfully saved checkpoint at iteration      10 ")
    run.launch.look()
    run.launch.process.kill()
    run.launch.process.wait()
    assert run.launch.left_after(10.0) == []
