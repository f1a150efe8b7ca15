"""The keeper of a rank: workers are replaced, signals handed on, and nobody outlives anybody."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from megatron.training.fault_tolerance.processes import KEEPER_NAME, identify, name_of
from tests.harness.training_run import REPOSITORY

# A rank whose workers do what the words of the command say, one word each.
RANK = """
import dataclasses, os, signal, sys, time
from types import SimpleNamespace
from megatron.training.initialize import LaunchEnvironment
from megatron.training.fault_tolerance.supervisor import keep_rank
config = SimpleNamespace(restart=SimpleNamespace(inprocess_restart=True, non_persistent_save_interval=None))
kept = keep_rank(config, LaunchEnvironment(rank=3, world_size=1))
assert 'torch' not in sys.modules
deed = sys.argv[1:][min(kept.num_predecessors, len(sys.argv) - 2)]
print(deed, os.getpid(), kept.counts.steps, kept.counts.saved, flush=True)
if deed == 'works':
    kept.counts.note_step()
    kept.counts.note_saved(40 + kept.num_predecessors)
    os.kill(os.getpid(), signal.SIGKILL)
if deed == 'dies':
    os.kill(os.getpid(), signal.SIGKILL)
if deed == 'fails':
    os._exit(75)
if deed == 'answers':
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
while deed in ('waits', 'answers'):
    time.sleep(0.02)
sys.exit(int(deed))
"""


def start(*deeds: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RANK, *deeds], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=REPOSITORY
    )


def read_worker(process: subprocess.Popen[str]) -> int:
    assert process.stdout is not None
    return int(process.stdout.readline().split()[1])


def test_workers_are_replaced_until_one_ends_a_run_and_what_they_count_stays() -> None:
    process = start("works", "fails", "works", "0")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 0
    said = [(words[0], *words[2:]) for words in map(str.split, out.splitlines())]
    assert said == [("works", "0", "None"), ("fails", "1", "40"), ("works", "1", "40"), ("0", "2", "42")]
    lines = errors.splitlines()
    assert [line.partition(": process ")[0] for line in lines] == 3 * ["WARNING: rank 3"]
    assert "was ended by SIGKILL" in lines[0]
    assert "has failed" in lines[1]


@pytest.mark.parametrize("status", [1, 2])
def test_the_end_of_a_run_is_the_keepers_too(status: int) -> None:
    process = start(str(status))
    assert process.communicate(timeout=60)[1] == ""
    assert process.returncode == status


def test_a_rank_that_gets_nothing_done_is_given_up() -> None:
    process = start("dies")
    out, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert len(out.splitlines()) == 10
    assert errors.splitlines()[-1].startswith("error: rank 3: process ")


def test_a_worker_that_answers_sigterm_ends_the_rank_with_its_status() -> None:
    process = start("answers")
    worker = read_worker(process)
    assert (name_of(process.pid), name_of(worker) == KEEPER_NAME) == (KEEPER_NAME, False)
    time.sleep(0.1)
    process.terminate()
    assert process.wait(30) == 0


def test_a_worker_that_a_signal_ends_is_not_replaced_when_the_keeper_was_told_to_end() -> None:
    process = start("waits")
    read_worker(process)
    process.terminate()
    assert process.wait(30) == 128 + signal.SIGTERM


def test_a_worker_ends_with_its_keeper() -> None:
    process = start("waits")
    worker = identify(read_worker(process))
    process.kill()
    process.wait()
    deadline = time.monotonic() + 10
    while worker.is_alive:
        assert time.monotonic() < deadline
        time.sleep(0.02)
