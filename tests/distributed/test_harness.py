"""The harness that the other multi-process tests stand on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist

from tests.harness.distributed import RankFailure, run_distributed
from tests.harness.training_run import REPOSITORY

STARTS_A_COMMAND = """
import sys
from tests.harness.training_run import run_command
run_command([sys.executable, "-c", "import sys, time; open(sys.argv[1], 'w').close(); time.sleep(60)", sys.argv[1]])
"""


def test_a_command_ends_with_the_tests_that_started_it(tmp_path: Path) -> None:
    """It has a session of its own, so that the signal that ends the tests does not reach it."""
    mark = tmp_path / "begun"
    tests = subprocess.Popen([sys.executable, "-c", STARTS_A_COMMAND, str(mark)], cwd=REPOSITORY)
    deadline = time.monotonic() + 30.0
    while not mark.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    (command,) = psutil.Process(tests.pid).children()
    tests.kill()
    tests.wait()
    psutil.wait_procs([command], 10.0)
    assert not command.is_running()


@dataclass(frozen=True)
class Measurement:
    """A class of a test module, to travel both ways."""

    rank: int
    values: torch.Tensor


class NeedsTwoArgumentsError(Exception):
    """Pickles, and then refuses to unpickle."""

    def __init__(self, first: str, second: str) -> None:
        super().__init__(f"{first} and {second}")


def scaled_rank(factor: int, *, offset: int = 0) -> int:
    return dist.get_rank() * factor + offset


def reduced_rank(measurement: Measurement) -> Measurement:
    total = measurement.values + dist.get_rank()
    dist.all_reduce(total)
    return Measurement(dist.get_rank(), total)


def environment_of_rank() -> tuple[int, int, int, int, int]:
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "OMP_NUM_THREADS")
    rank, local_rank, world_size, threads = (int(os.environ[name]) for name in names)
    return rank, local_rank, world_size, threads, torch.get_num_threads()


def raise_on_rank(rank: int) -> None:
    if dist.get_rank() == rank:
        print("said before the failure")
        raise ValueError(f"rank {rank} does not like 17")
    dist.barrier()


def raise_unpicklable() -> None:
    raise NeedsTwoArgumentsError("one", "two")


def wait_for_nobody() -> None:
    if dist.get_rank() == 1:
        time.sleep(600)
    dist.barrier()


def raise_while_others_sleep() -> None:
    dist.barrier()  # a rank that is still connecting would fail too
    if dist.get_rank() == 2:
        raise KeyError("absent")
    time.sleep(600)


def die() -> None:
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def start_child_and_hang(pid_file: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    with open(pid_file, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def random_number() -> float:
    return torch.rand(()).item()


@torch.no_grad()
def grad_mode() -> bool:
    return torch.is_grad_enabled()


def test_results_come_in_rank_order() -> None:
    assert run_distributed(3, scaled_rank, 10, offset=1) == [1, 11, 21]


def test_single_rank_has_a_process_group() -> None:
    assert run_distributed(1, scaled_rank, 10, offset=4) == [4]


def test_ranks_communicate_and_exchange_classes_of_the_test_module() -> None:
    results = run_distributed(4, reduced_rank, Measurement(-1, torch.tensor([1.0, 2.0, 3.0])))
    assert [result.rank for result in results] == [0, 1, 2, 3]
    for result in results:
        assert isinstance(result, Measurement)
        torch.testing.assert_close(result.values, torch.tensor([10.0, 14.0, 18.0]))


def test_every_rank_finds_its_place_in_the_environment_and_runs_on_one_thread() -> None:
    assert run_distributed(2, environment_of_rank) == [(0, 0, 2, 1, 1), (1, 1, 2, 1, 1)]


def test_jobs_do_not_share_random_state() -> None:
    assert run_distributed(1, random_number) == run_distributed(1, random_number)


def test_raising_rank_is_named_with_its_traceback_and_cause() -> None:
    with pytest.raises(RankFailure, match="rank 2 of 3 raised") as caught:
        run_distributed(3, raise_on_rank, 2)
    assert caught.value.rank == 2
    assert "in raise_on_rank" in str(caught.value)
    assert "rank 2 does not like 17" in str(caught.value)
    assert "said before the failure" in str(caught.value)
    assert isinstance(caught.value.__cause__, ValueError)


def test_exception_that_cannot_be_unpickled_is_told_as_text() -> None:
    with pytest.raises(RankFailure, match="one and two") as caught:
        run_distributed(1, raise_unpicklable)
    assert caught.value.__cause__ is None


def test_hanging_ranks_are_ended_at_the_limit_with_the_stacks_of_each() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[0, 1\] of 2 ran past 1\.0 s") as caught:
        run_distributed(2, wait_for_nobody, timeout_s=1.0)
    report = str(caught.value)
    for rank in (0, 1):
        assert f"--- stacks of rank {rank} ---" in report
    assert report.count("in wait_for_nobody") == 2
    assert "barrier" in report


def test_failure_does_not_wait_for_ranks_that_hang() -> None:
    with pytest.raises(RankFailure, match="rank 2 of 3 raised") as caught:
        run_distributed(3, raise_while_others_sleep, timeout_s=300.0)
    assert "rank 0 had to be ended" in str(caught.value)
    assert isinstance(caught.value.__cause__, KeyError)


def test_rank_that_dies_is_named() -> None:
    with pytest.raises(RankFailure, match="rank 1 of 2 died with exit code -9") as caught:
        run_distributed(2, die)
    assert caught.value.rank == 1


def test_processes_started_by_a_rank_end_with_it(tmp_path) -> None:
    pid_file = tmp_path / "pid"
    with pytest.raises(RankFailure):
        run_distributed(1, start_child_and_hang, str(pid_file), timeout_s=1.0)
    pid = int(pid_file.read_text())
    deadline = time.monotonic() + 5.0
    while _is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _is_running(pid)


def test_a_job_runs_after_failed_ones() -> None:
    with pytest.raises(RankFailure):
        run_distributed(2, raise_on_rank, 0)
    assert run_distributed(2, scaled_rank, 3) == [0, 3]


def test_decorated_functions_run() -> None:
    assert run_distributed(2, grad_mode) == [False, False]


def test_functions_that_ranks_cannot_find_are_refused() -> None:
    with pytest.raises(TypeError, match="not a module-level function"):
        run_distributed(2, lambda: None)


def _is_running(pid: int) -> bool:
    """Return whether the process exists and is not merely waiting to be collected."""
    listed = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return bool(listed.stdout.strip()) and not listed.stdout.strip().startswith("Z")
