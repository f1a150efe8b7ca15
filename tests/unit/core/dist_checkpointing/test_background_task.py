"""Work in a thread: its result and its error are handed on."""

from __future__ import annotations

import threading

import pytest

from megatron.core.dist_checkpointing.background_task import BackgroundTask


def test_the_result_waits_for_whoever_asks() -> None:
    go = threading.Event()
    task = BackgroundTask(lambda: go.wait(10.0) and threading.current_thread().name, "worker")
    assert not task.is_done
    go.set()
    assert task.result() == "worker"
    assert task.is_done
    assert task.result() == "worker"


def test_an_error_is_raised_by_whoever_asks() -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    task = BackgroundTask(fail, "worker")
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            task.result()
    assert task.is_done
