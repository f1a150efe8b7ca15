"""Working ahead in threads: order, errors, and ends."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import Future, wait
from concurrent.futures._base import DoneAndNotDoneFutures
from pathlib import Path

import pytest

from megatron.core.datasets import micro_batch_reader
from megatron.core.datasets.micro_batch_reader import ReadAhead

REPOSITORY = Path(__file__).resolve().parents[4]

LEAVES_WHILE_READING = """
import os, signal, sys
import numpy as np
from megatron.core.datasets.micro_batch_reader import ReadAhead

def read(job):
    return np.sort(np.random.rand(300_000)).sum()

ahead = ReadAhead(read, iter(range(10**9)), 2)
for _ in range(5):
    next(ahead)
if sys.argv[1] == "returns":
    pass
elif sys.argv[1] == "raises":
    raise ValueError("the end")
elif sys.argv[1] == "exits":
    sys.exit(3)
elif sys.argv[1] == "is interrupted":
    # A child of a shell's background job inherits an ignored SIGINT, and Python then installs no handler.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.kill(os.getpid(), signal.SIGINT)
    next(ahead)
"""


def identity(job: int) -> int:
    return job


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("batch reader")]


def wait_until_gone() -> None:
    deadline = time.monotonic() + 10.0
    while reader_threads():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_results_come_in_the_order_of_the_jobs(num_threads: int) -> None:
    def later_jobs_are_quicker(job: int) -> int:
        time.sleep(0.002 * (job % 3 == 0))
        return 10 * job

    ahead = ReadAhead(later_jobs_are_quicker, iter(range(31)), num_threads)
    assert list(ahead) == list(range(0, 310, 10))
    assert list(ahead) == []
    ahead.close()


def test_jobs_are_taken_by_the_caller_and_no_more_than_the_depth_ahead() -> None:
    taken: list[int] = []
    takers = set()

    def jobs() -> Iterator[int]:
        for job in range(100):
            taken.append(job)
            takers.add(threading.get_ident())
            yield job

    ahead = ReadAhead(identity, jobs(), 3)
    assert taken == []
    for given in range(5):
        assert next(ahead) == given
        assert len(taken) == given + 1 + 6
    ahead.close()
    assert takers == {threading.get_ident()}


def test_without_threads_nothing_is_done_before_it_is_due() -> None:
    done: list[int] = []
    ahead = ReadAhead(done.append, iter(range(5)), 0)
    assert done == []
    next(ahead)
    assert done == [0]
    assert reader_threads() == []


@pytest.mark.parametrize("num_threads", [0, 1, 3])
def test_an_error_is_raised_where_its_result_is_due_and_ends_it(num_threads: int) -> None:
    def fails_at_5(job: int) -> int:
        if job == 5:
            raise ValueError("sample 17 is damaged")
        return job

    ahead = ReadAhead(fails_at_5, iter(range(100)), num_threads)
    assert [next(ahead) for _ in range(5)] == [0, 1, 2, 3, 4]
    with pytest.raises(ValueError, match="sample 17 is damaged"):
        next(ahead)
    assert reader_threads() == []
    assert list(ahead) == []


def test_an_error_of_the_jobs_themselves_ends_it_too() -> None:
    def jobs() -> Iterator[int]:
        yield 1
        raise ValueError("no more")

    with pytest.raises(ValueError, match="no more"):
        next(ReadAhead(identity, jobs(), 2))
    assert reader_threads() == []


def test_closing_waits_for_what_is_begun_only(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    waited_for: list[Future[int]] = []
    may_end = threading.Event()

    def recording_wait(jobs: list[Future[int]], timeout: float) -> DoneAndNotDoneFutures[int]:
        waited_for.extend(jobs)
        return wait(jobs, timeout)

    def slow(job: int) -> int:
        begun.append(job)
        if job:
            assert may_end.wait(10.0)
        return job

    monkeypatch.setattr(micro_batch_reader, "wait", recording_wait)
    ahead = ReadAhead(slow, iter(range(100)), 1)
    assert next(ahead) == 0
    threading.Timer(0.05, may_end.set).start()
    ahead.close()
    # A cancelled job never counts as done: waiting for one takes the whole time that is allowed.
    assert [job.cancelled() for job in waited_for] == [False] * (len(begun) - 1)
    assert reader_threads() == []
    assert begun in ([0], [0, 1])
    with pytest.raises(StopIteration):
        next(ahead)
    ahead.close()


def test_threads_end_with_what_is_forgotten() -> None:
    ahead = ReadAhead(identity, iter(range(10**9)), 2)
    assert next(ahead) == 0
    assert reader_threads()
    del ahead
    wait_until_gone()


@pytest.mark.parametrize(
    ("how", "status", "last_line"),
    [
        ("returns", 0, ""),
        ("raises", 1, "ValueError: the end"),
        ("exits", 3, ""),
        ("is interrupted", -2, "KeyboardInterrupt"),
    ],
)
def test_a_process_that_leaves_while_batches_are_read_ends_as_it_would(how: str, status: int, last_line: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", LEAVES_WHILE_READING, how],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=60.0,
    )
    assert (result.returncode, result.stderr.strip().rpartition("\n")[2]) == (status, last_line)
    assert result.stderr.count("Traceback (most recent call last)") == bool(last_line)


def test_a_thread_that_is_stuck_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(micro_batch_reader, "_LAST_JOBS_S", 0.05)
    release = threading.Event()

    def fail_then_stick(job: int) -> int:
        if job == 1:
            raise ValueError("the second job")
        if job > 1:
            release.wait(60.0)
        return job

    ahead = ReadAhead(fail_then_stick, iter(range(100)), 2)
    assert next(ahead) == 0
    with pytest.raises(ValueError, match="the second job"):
        next(ahead)
    assert reader_threads()
    release.set()
    wait_until_gone()


def test_unread_results_are_released_on_close() -> None:
    made: list[weakref.ref[set[int]]] = []
    all_made = threading.Event()

    def make(job: int) -> set[int]:
        result = {job}
        made.append(weakref.ref(result))
        if job == 2:
            all_made.set()
        return result

    ahead = ReadAhead(make, iter(range(3)), 1)
    next(ahead)
    assert all_made.wait(10.0)
    ahead.close()
    assert [result() for result in made] == [None] * 3
