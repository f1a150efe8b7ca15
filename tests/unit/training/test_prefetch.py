"""Reading micro-batches ahead in a thread."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.training.data_setup import prefetch

REPOSITORY = Path(__file__).resolve().parents[3]

LEAVES_WHILE_READING = """
import torch
from megatron.training.data_setup import prefetch

def read():
    while True:
        yield torch.randn(300, 300).sort()[0]

def train():
    batches = prefetch(read(), 2)
    for _ in range(5):
        next(batches)

train()
"""


def reader_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "batch reader"]


def test_order_and_end_are_those_of_the_reader() -> None:
    assert list(prefetch(iter(range(7)), 3)) == list(range(7))
    assert reader_threads() == []


def test_no_more_than_the_depth_is_read_ahead() -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            taken.append(number)
            yield number

    ahead = prefetch(numbers(), 2)
    assert next(ahead) == 0
    # Two in the queue, one more in the reader's hand.
    assert len(taken) <= 1 + 2 + 1
    ahead.close()


def test_error_of_the_reader_is_raised_where_its_batch_is_due() -> None:
    def numbers() -> Iterator[int]:
        yield 5
        raise ValueError("sample 17 is damaged")

    ahead = prefetch(numbers(), 2)
    assert next(ahead) == 5
    with pytest.raises(ValueError, match="sample 17 is damaged"):
        next(ahead)
    assert reader_threads() == []


def test_thread_ends_with_the_iterator() -> None:
    ahead = prefetch(iter(range(10**9)), 2)
    assert next(ahead) == 0
    assert len(reader_threads()) == 1
    del ahead
    assert reader_threads() == []


def test_process_that_leaves_while_batches_are_read_exits_normally() -> None:
    result = subprocess.run(
        [sys.executable, "-c", LEAVES_WHILE_READING], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")
