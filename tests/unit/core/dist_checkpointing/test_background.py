"""Work in a thread hands on its result and its error; copies stay as they were taken, in memory taken once."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.core.dist_checkpointing.background import BackgroundTask, StagingArea


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


def tensors(seed: int) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    wide = torch.randn(6, 9)
    return [
        torch.randn(3, dtype=torch.float64),
        wide[:, 2:5],
        wide[3, 4],
        torch.randn(5, 7).bfloat16().t(),
        wide[:0].bfloat16(),
        torch.arange(7, dtype=torch.uint8),
    ]


def test_copies_stay_as_they_were_taken() -> None:
    synchronized: list[bool] = []
    area = StagingArea(lambda: synchronized.append(True))
    live = tensors(1)
    copies = area.copy(live)
    assert synchronized == [True]
    for tensor in live:
        tensor.zero_()
    for copy, expected in zip(copies, tensors(1), strict=True):
        assert copy.dtype == expected.dtype
        assert torch.equal(copy, expected)
        assert copy.is_contiguous()


def test_memory_is_taken_once_and_grows_where_it_must() -> None:
    area = StagingArea(lambda: None)
    first = area.copy(tensors(1))
    size = area.num_bytes
    assert size == sum(tensor.nbytes for tensor in first)
    for seed in (2, 3):
        again = area.copy(tensors(seed)[seed - 2 :])
        assert again[0].untyped_storage().data_ptr() == first[0].untyped_storage().data_ptr()
        assert area.num_bytes == size
    area.copy([torch.zeros(100)])
    assert area.num_bytes == 400
