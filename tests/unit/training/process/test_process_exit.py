"""A process ends with the status of its program, whatever its native threads are doing."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.harness.training_run import REPOSITORY

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
