"""Processes and their end: launchers behind shells, statuses, and time from a signal to a checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.training.callbacks.exit_warning import ExitWarning
from megatron.training.fault_tolerance.processes import find_launcher, process_start_time
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
from megatron.training.fault_tolerance import processes
processes.GRACE_S = 1.0
if sys.argv[1] == 'answers':
    signal.signal(signal.SIGTERM, lambda *_: print('answered', flush=True))
processes.die_with_launcher('{RUN_ID}', 1)
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


TWO_RANKS = (
    "import os, subprocess, sys\n"
    f"run = {{'TORCHELASTIC_RUN_ID': '{RUN_ID}', 'MASTER_ADDR': 'localhost', 'MASTER_PORT': '1', 'WORLD_SIZE': '2'}}\n"
    "for port in ('1', '1', '2'):\n"
    "    environment = os.environ | run | {'MASTER_PORT': port}\n"
    "    words = sys.argv[1:] if port == '1' else [sys.executable, '-c', 'import time; time.sleep(60)']\n"
    "    process = subprocess.Popen(words, env=environment, start_new_session=True)\n"
    "    os.write(1, b'%d\\n' % process.pid)\n"
    "sys.stdin.read()\n"
)


def test_a_stopped_process_is_killed_by_another_one_of_its_run() -> None:
    """The kernel's signal and the process's own watch do not reach it. Other runs on the node are left alone."""
    # Each line is one write: with PYTHONUNBUFFERED, `print` writes the end of a line by itself, and lines would mix.
    follow = FOLLOW.replace("print('rank', os.getpid(), flush=True)", "os.write(1, b'rank\\n')")
    assert follow != FOLLOW
    launcher = subprocess.Popen(
        [sys.executable, "-c", TWO_RANKS, sys.executable, "-c", follow, "answers"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
    )
    assert launcher.stdout is not None
    lines = [launcher.stdout.readline().strip() for _ in range(5)]
    *ranks, other = (int(line) for line in lines if line != "rank")
    try:
        os.kill(ranks[1], signal.SIGSTOP)
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 15.0
        while any(map(is_alive, ranks)):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert is_alive(other)
    finally:
        for pid in (*ranks, other):
            if is_alive(pid):
                os.kill(pid, signal.SIGKILL)


def test_a_process_that_torchrun_did_not_start_has_no_launcher() -> None:
    assert find_launcher("") is None


BUSY = """
import atexit, sys, threading, torch

matrix = torch.ones(300, 300)
started = threading.Semaphore(0)

def multiply():
    started.release()
    while True:
        torch.mm(matrix, matrix)

def main():
    atexit.register(lambda: print("atexit ran"))
    for _ in range(3):
        threading.Thread(target=multiply, daemon=True).start()
    for _ in range(3):
        started.acquire()
    print("done")
    {ending}
"""
OURS = "\nfrom megatron.training.exit_reason import run_program\nrun_program(main)\n"


def run(ending: str) -> subprocess.CompletedProcess[str]:
    script = BUSY.format(ending=ending) + OURS
    return subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)


@pytest.mark.full
@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("return 0", 0),
        pytest.param("return 2", 2, marks=pytest.mark.long),
        ("sys.exit(2)", 2),
        pytest.param("sys.exit()", 0, marks=pytest.mark.long),
    ],
)
def test_the_status_is_that_of_the_program(ending: str, status: int) -> None:
    ended = run(ending)
    assert (ended.returncode, ended.stderr) == (status, "")
    assert ended.stdout == "done\natexit ran\n"


@pytest.mark.full
def test_a_program_that_fails_says_how_and_has_status_1() -> None:
    ended = run("raise ValueError('five')")
    assert ended.returncode == 1
    assert ended.stderr.startswith("Traceback")
    assert ended.stderr.endswith("ValueError: five\n")


def test_a_status_in_words_is_left_to_the_interpreter() -> None:
    imports = "import sys\nfrom megatron.training.exit_reason import run_program\n"
    script = f"{imports}run_program(lambda: sys.exit('no'))\n"
    ended = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (1, "no\n")


@pytest.mark.full
def test_a_reader_that_has_gone_is_not_a_success() -> None:
    script = BUSY.format(ending="return 0") + OURS
    process = subprocess.Popen([sys.executable, "-c", script], cwd=REPOSITORY, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 1


class Clock:
    """Tell the time that a test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def measured(
    seconds: int | None, is_async: bool = False, stretches: tuple[float, ...] = (2.0, 7.0, 3.0)
) -> ExitWarning:
    """Return a warning whose ranks looked for signals at first, and then after each of the stretches."""
    clock = Clock()
    warning = ExitWarning(seconds, is_async, clock)
    warning.look()
    for stretch in (2.0, 7.0, 3.0):
        clock.now += stretch
        warning.look()
    return warning


def test_what_fits_is_not_mentioned() -> None:
    assert measured(10).line(3.0) is None
    assert measured(10).line(None) is None
    assert measured(None).line(1e6) is None


def test_what_does_not_fit_is_said_with_its_parts() -> None:
    line = measured(10).line(3.5)
    assert line is not None
    assert "may need 10.5 s (7.0 s until it looks for signals, 3.5 s for a checkpoint)" in line
    assert "--preemption-grace-seconds is only 10" in line


def test_beside_training_a_save_under_way_comes_first() -> None:
    assert measured(14, is_async=True).line(3.5) is None
    line = measured(13, is_async=True).line(3.5)
    assert line is not None
    assert "may need 14.0 s" in line
    assert "3.5 s for a checkpoint, including a save in progress)" in line


def test_it_is_said_again_when_it_is_much_worse() -> None:
    warning = measured(10)
    found = [warning.line(seconds) is not None for seconds in (4.0, 4.0, 8.0, 9.6, 9.7)]
    assert found == [True, False, False, True, False]


def test_the_start_of_a_process_is_that_of_its_interpreter() -> None:
    code = "import time; time.sleep(0.5); from megatron.training.fault_tolerance.processes import *; "
    code += "print(process_start_time())"
    before = time.time()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=REPOSITORY)
    # The kernel counts in hundredths of a second.
    assert before - 0.02 <= float(done.stdout) <= time.time() - 0.5
    assert process_start_time() < before
