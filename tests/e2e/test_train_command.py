"""What users of ``megatron train`` and torchrun see of the end of a run: each test starts real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.toy_run import newest, toy_args
from tests.harness.faults import Faults
from tests.harness.training_run import LAUNCHER_VARIABLES, REPOSITORY, launch_prefix

MEGATRON = [sys.executable, "-m", "megatron"]
FAULTY = str(REPOSITORY / "tests/harness/faults.py")
ENDLESS = "--train-iters 100000 --lr-decay-iters 100 --save-interval 100000"


class Command:
    """Run a command in the background, with all that it prints in one file."""

    def __init__(self, folder: Path, words: list[str], faults: Faults = Faults()) -> None:
        self.output = folder / "output.txt"
        environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
        environment |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "MEGATRON_DEVICE": "cpu"}
        environment |= {"PYTHONPATH": str(REPOSITORY), **faults.environment()}
        with self.output.open("w") as output:
            self.process = subprocess.Popen(
                words, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def wait_for(self, text: str, timeout_s: float = 90.0) -> None:
        deadline = time.monotonic() + timeout_s
        while text not in self.output.read_text():
            assert time.monotonic() < deadline, f"no {text!r} in: {self.output.read_text()[-4000:]}"
            assert self.process.poll() is None, self.output.read_text()[-4000:]
            time.sleep(0.05)

    def end(self) -> tuple[int, list[str]]:
        """Wait for the end and return the exit status and the lines that were printed."""
        status = self.process.wait(60.0)
        return status, self.output.read_text().splitlines()


@pytest.fixture
def command(tmp_path: Path):
    """Return a function that starts a command; it is killed after the test where it still runs."""
    started: list[Command] = []

    def start(words: list[str], faults: Faults = Faults()) -> Command:
        started.append(Command(tmp_path, words, faults))
        return started[-1]

    yield start
    for each in started:
        each.process.kill()
        each.process.wait()


def test_ctrl_c_saves_and_ends_all_ranks(command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, ENDLESS, "--tensor-model-parallel-size 2")
    run = command([*MEGATRON, "train", "--nproc", "2", *args])
    run.wait_for("iteration        3/")
    run.process.send_signal(signal.SIGINT)
    status, lines = run.end()
    assert status == 0
    assert sum(line.startswith("stopping after this step") for line in lines) == 1
    assert lines[-1].startswith("exiting program at iteration ")
    assert newest(tmp_path / "checkpoints").is_dir()


@pytest.mark.long
def test_ctrl_c_saves_and_ends_one_process(command, tmp_path: Path) -> None:
    run = command([*MEGATRON, "train", *toy_args(tmp_path, ENDLESS)])
    run.wait_for("iteration        3/")
    run.process.send_signal(signal.SIGINT)
    status, lines = run.end()
    assert status == 0
    assert lines[-1].startswith("exiting program at iteration ")
    assert newest(tmp_path / "checkpoints").is_dir()


@pytest.mark.long
@pytest.mark.parametrize("nproc", [1, 2])
def test_a_second_ctrl_c_ends_at_once(nproc: int, command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, ENDLESS)
    slow = Faults(rank=0, sleep_at=6)
    run = command([*MEGATRON, "train", "--nproc", str(nproc), "--script", FAULTY, *args], slow)
    run.wait_for("iteration        2/")
    time.sleep(1.0)
    run.process.send_signal(signal.SIGINT)
    run.wait_for("stopping after this step")
    assert run.process.poll() is None
    run.process.send_signal(signal.SIGINT)
    assert run.process.wait(10.0) in (130, -signal.SIGINT)
    assert not (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.long
def test_a_rank_that_fails_is_named_in_the_last_line(command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--tensor-model-parallel-size 2 --train-iters 5")
    run = command([*MEGATRON, "train", "--nproc", "2", "--script", FAULTY, *args], Faults(rank=1, raise_at=3))
    status, lines = run.end()
    reason = "ValueError: a fault of micro-batch 3 on rank 1"
    assert status == 1
    assert lines[-1] == f"error: rank 1: {reason} (its traceback is above)"
    assert sum("Traceback" in line for line in lines) == 1
    assert sum(line.startswith("error: ") for line in lines) == 1


@pytest.mark.long
def test_a_rank_that_is_killed_is_named_in_the_last_line(command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, ENDLESS)
    run = command([*MEGATRON, "train", "--nproc", "2", *args])
    run.wait_for("iteration        3/")
    listed = subprocess.run(
        ["pgrep", "-P", str(run.process.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    os.kill(int(listed[1]), signal.SIGKILL)
    status, lines = run.end()
    assert status == 137
    assert lines[-1].startswith(f"error: rank 1 (process {listed[1]}) was ended by SIGKILL; ")


@pytest.mark.long
def test_a_refusal_of_the_ranks_is_the_last_line_and_status_2(command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--data-path", tmp_path / "missing", data=False)
    status, lines = command([*MEGATRON, "train", "--nproc", "2", *args]).end()
    assert status == 2
    assert len(lines) == 1
    assert lines[0].startswith("error: ")
    assert str(tmp_path / "missing") in lines[0]


@pytest.mark.long
def test_under_torchrun_a_refusal_is_said_once_and_last(command, tmp_path: Path) -> None:
    status, lines = command([*launch_prefix(2), str(REPOSITORY / "pretrain_gpt.py"), "--hiden-size", "3"]).end()
    assert status == 1
    first = lines.index("error: unknown flag --hiden-size; did you mean --hidden-size?")
    assert all(line.startswith("error: ") for line in lines[first:])
    assert any("ChildFailedError" in line for line in lines[:first])
    assert not any(line.startswith("error: ") for line in lines[:first])


@pytest.mark.long
def test_under_torchrun_the_reason_of_a_failure_is_the_last_line_too(command, tmp_path: Path) -> None:
    args = toy_args(tmp_path, "--tensor-model-parallel-size 2 --train-iters 5")
    status, lines = command([*launch_prefix(2), FAULTY, *args], Faults(rank=1, raise_at=3)).end()
    assert status == 1
    assert lines[-1] == "error: rank 1: ValueError: a fault of micro-batch 3 on rank 1 (its traceback is above)"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ("--nproc 0", "--nproc 0: a number from 1 to 4096 is expected"),
        ("--nproc 2 --master-port 5", "--master-port: one machine needs none; give --nnodes, or leave it out"),
        ("--nnodes 2 --nproc 2", "--nnodes 2 needs --node-rank and --master-addr on each machine"),
        ("--nnodes 2 --node-rank 2 --master-addr h", "--node-rank 2: a number from 0 to 1 is expected"),
        ("--nproc", "--nproc: a value is missing; see megatron train --help"),
        ("--script no.py", "--script no.py is not there; name a Python file that trains"),
    ],
)
def test_ranks_that_cannot_be_are_refused_in_one_line(words: str, reason: str, capsys) -> None:
    from megatron.cli.train import main

    assert main(words.split()) == 2
    assert capsys.readouterr().err == f"error: {reason}\n"
