"""A torchrun that is killed takes its ranks along, and its run goes on in the next one."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from megatron.checkpoint.checkpoint_folder import saved_iterations
from tests.e2e.test_torchrun import RANKS_MUST_BE_GONE_S, Launch
from tests.e2e.toy_run import exact_figures, leftovers, toy_args
from tests.harness.faults import Faults
from tests.harness.training_run import REPOSITORY, read_metrics

FLAGS = "--save-interval 1 --keep-last 3 --train-iters 4000 --lr-decay-iters 60 --eval-interval 500 --bf16"
LOADED = re.compile(r"successfully loaded checkpoint from .* at iteration (\d+)")


def is_running(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait_until_gone(processes: list[psutil.Process]) -> None:
    deadline = time.monotonic() + RANKS_MUST_BE_GONE_S
    while running := [process for process in processes if is_running(process)]:
        assert time.monotonic() < deadline, running
        time.sleep(0.05)


def kill_launcher(launch: Launch) -> list[psutil.Process]:
    """Kill torchrun and nothing else; return its ranks."""
    ranks = launch.ranks()
    assert len(ranks) == 2
    launch.process.kill()
    launch.process.wait()
    return ranks


def newest_complete(checkpoints: Path) -> int:
    return max(saved_iterations(checkpoints), default=0)


def test_ranks_end_with_their_launcher_and_the_next_start_goes_on(tmp_path: Path) -> None:
    args = toy_args(tmp_path, FLAGS, "--tensor-model-parallel-size 2")
    checkpoints = tmp_path / "checkpoints"
    first = Launch(tmp_path, args, Faults())
    try:
        first.wait_for("successfully saved checkpoint at iteration       3 ")
        ranks = kill_launcher(first)
        # The next one does not wait for the ranks of the first to end.
        again = Launch(tmp_path, [*args, "--exit-interval", "1"], Faults())
        try:
            wait_until_gone(ranks)
            assert again.wait(90.0) == 0, again.output.read_text()[-4000:]
        finally:
            again.close()
    finally:
        first.close()
    match = LOADED.search(again.output.read_text())
    assert match is not None
    loaded = int(match.group(1))
    assert loaded >= 3
    assert saved_iterations(checkpoints)[-3:] == [loaded - 1, loaded, loaded + 1]
    assert leftovers(checkpoints) == []
    iterations = [line["iteration"] for line in read_metrics(checkpoints / "metrics.jsonl") if "split" not in line]
    assert iterations == list(range(1, loaded + 2))


def test_a_run_without_a_launcher_outlives_the_shell_that_started_it(tmp_path: Path) -> None:
    done = tmp_path / "done"
    program = (
        "import pathlib, sys, time\n"
        "from megatron.training.exit_reason import launch_environment_or_exit\n"
        "launch_environment_or_exit()\n"
        "sys.stdin.read()\n"
        "time.sleep(1.0)\n"
        "pathlib.Path(sys.argv[1]).touch()\n"
    )
    command = f"{sys.executable} -c '{program}' {done} & read line"
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    shell = subprocess.Popen(
        ["bash", "-c", f"exec 3<&0; {command.replace('&', '<&3 &', 1)}"],
        stdin=subprocess.PIPE,
        cwd=REPOSITORY,
        env=environment | {"RANK": "0", "WORLD_SIZE": "1"},
    )
    assert shell.stdin is not None
    time.sleep(0.5)
    shell.kill()
    shell.wait()
    shell.stdin.close()
    deadline = time.monotonic() + 30.0
    while not done.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


HOW = ("a rank", "all ranks", "the launcher")
LAYOUTS = {
    "tp2": "--tensor-model-parallel-size 2",
    "dp2": "--use-distributed-optimizer --overlap-param-gather",
    "pp2": "--pipeline-model-parallel-size 2",
}


@pytest.mark.long
@pytest.mark.parametrize("saving", ["", "--async-save"], ids=["sync", "async"])
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_seventeen_kills_of_ranks_and_launchers_lose_nothing(layout: str, saving: str, tmp_path: Path) -> None:
    """Six times this is a hundred kills; each start follows its predecessor's end at once."""
    rng = random.Random(f"{layout} {saving}")
    args = toy_args(tmp_path, FLAGS, LAYOUTS[layout], saving)
    checkpoints = tmp_path / "checkpoints"
    for number in range(17):
        before = newest_complete(checkpoints) if checkpoints.exists() else 0
        how = HOW[number % 3]
        launch = Launch(tmp_path, args, Faults())
        try:
            launch.wait_for("[before the start of training step]", timeout_s=180.0)
            match = LOADED.search(launch.output.read_text())
            assert (int(match.group(1)) if match else 0) >= before
            time.sleep(rng.uniform(0.0, 2.0))
            ranks = launch.ranks()
            assert len(ranks) == 2
            if how == "the launcher":
                launch.process.kill()
            for rank in {"a rank": [rng.choice(ranks)], "all ranks": ranks}.get(how, []):
                rank.send_signal(signal.SIGKILL)
            launch.process.wait(60.0)
            if how == "the launcher" and number % 2:
                continue  # the next one starts while these end
            wait_until_gone(ranks)
        finally:
            if how != "the launcher":
                launch.close()
        assert newest_complete(checkpoints) >= before
    last = Launch(tmp_path, [*args, "--exit-interval", "1"], Faults())
    try:
        assert last.wait(180.0) == 0, last.output.read_text()[-4000:]
    finally:
        last.close()
    assert "damaged" not in last.output.read_text()
    assert leftovers(checkpoints) == []
    figures = exact_figures(read_metrics(checkpoints / "metrics.jsonl"))
    assert [line[0] for line in figures if line[1] is None] == list(range(1, newest_complete(checkpoints) + 1))
