"""The launcher of a process: found behind shells, and followed into its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.training.fault_tolerance.processes import find_launcher
from tests.harness.training_run import REPOSITORY

RUN_ID = "run-of-a-test"
# Starts the command of its arguments with the run's number, as torchrun does, says which process it is, and waits.
LAUNCHER = (
    "import os, subprocess, sys\n"
    f"subprocess.Popen(sys.argv[1:], env=os.environ | {{'TORCHELASTIC_RUN_ID': '{RUN_ID}'}}, start_new_session=True)\n"
    "print('launcher', os.getpid(), flush=True)\n"
    "sys.stdin.read()\n"
)
FIND = f"""
from megatron.training.fault_tolerance.processes import find_launcher
print('found', find_launcher('{RUN_ID}'), flush=True)
"""
FOLLOW = f"""
import os, signal, sys, time
from megatron.training.fault_tolerance import processes as launcher
launcher.GRACE_S = 1.0
if sys.argv[1] == 'answers':
    signal.signal(signal.SIGTERM, lambda *_: print('answered', flush=True))
launcher.die_with_launcher('{RUN_ID}', 1)
print('rank', os.getpid(), flush=True)
while True:
    time.sleep(0.05)
"""
BEHIND_A_SHELL = ["bash", "-c", '"$@"; true', "shell"]


def start(command: list[str]) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    return subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, *command],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=environment,
    )


def read_until(process: subprocess.Popen[str], *names: str) -> dict[str, int]:
    """Return the numbers that the processes print behind the names."""
    assert process.stdout is not None
    found: dict[str, int] = {}
    while not set(names) <= found.keys():
        name, number = process.stdout.readline().split()
        found[name] = int(number)
    return found


def is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


@pytest.mark.parametrize("shell", [[], BEHIND_A_SHELL], ids=["directly", "behind a shell"])
def test_the_launcher_is_the_first_parent_without_the_runs_number(shell: list[str]) -> None:
    launcher = start([*shell, sys.executable, "-c", FIND])
    found = read_until(launcher, "launcher", "found")
    assert found["found"] == found["launcher"] == launcher.pid
    launcher.communicate()


@pytest.mark.parametrize("shell", [[], BEHIND_A_SHELL], ids=["directly", "behind a shell"])
@pytest.mark.parametrize("how", ["answers", "does not"])
def test_a_process_ends_soon_after_its_launcher(how: str, shell: list[str]) -> None:
    launcher = start([*shell, sys.executable, "-c", FOLLOW, how])
    rank = read_until(launcher, "launcher", "rank")["rank"]
    launcher.send_signal(signal.SIGKILL)
    assert launcher.stdout is not None
    # The end of the output is that of the rank, which has it too.
    assert ("answered" in launcher.stdout.read()) == (how == "answers")
    launcher.wait()
    deadline = time.monotonic() + 10.0
    while is_alive(rank):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_a_process_that_torchrun_did_not_start_has_no_launcher() -> None:
    assert find_launcher("") is None
