"""Work in a thread hands on its result and its error; copies stay as they were taken, in memory taken once."""

from __future__ import annotations

import threading

import pytest
import torch

from megatron.core.dist_checkpointing import async_save
from megatron.core.dist_checkpointing.async_save import BackgroundTask, StagingArea
from megatron.core.host_memory import pack


def test_the_result_waits_for_whoever_asks() -> None:
    go = threading.Event()
    task = BackgroundTask(lambda: go.wait(10.0) and threading.current_thread().name, "worker")
    assert not task.is_done
    go.set()
    assert task.result() == "worker"
    assert task.is_done
    assert task.result() == "worker"


def test_the_end_of_the_work_can_be_waited_for() -> None:
    go = threading.Event()
    task = BackgroundTask(lambda: go.wait(10.0), "worker")
    threading.Timer(0.02, go.set).start()
    task.wait()
    assert task.is_done


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
    assert 0 <= size - sum(tensor.nbytes for tensor in first) < 256 * len(first)
    for seed in (2, 3):
        again = area.copy(tensors(seed)[seed - 2 :])
        assert again[0].untyped_storage().data_ptr() == first[0].untyped_storage().data_ptr()
        assert area.num_bytes == size
    area.copy([torch.zeros(1000)])
    assert area.num_bytes == 4096
    assert area.copy([torch.zeros(0)])[0].shape == (0,)
    assert StagingArea(lambda: None).copy([]) == []


def test_copies_of_a_devices_tensors_lie_in_several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is page-locked is packed into blocks of powers of two; here the device is pretended, the bytes are not."""
    monkeypatch.setattr(async_save, "side_by_side", pack)
    made: list[int] = []

    def make(num_bytes: int, is_pinned: bool) -> torch.Tensor:
        made.append(num_bytes)
        return torch.empty(num_bytes, dtype=torch.uint8)

    area = StagingArea(lambda: None, make)
    lengths = [3 * 2**18, 2**18 + 5, 7, 2**18 - 3, 0, 2**17 + 1]
    for seed in (1, 2):
        torch.manual_seed(seed)
        live = [torch.randn(length, dtype=torch.float64).to(torch.float32) for length in lengths]
        expected = [tensor.clone() for tensor in live]
        copies = area.copy(live)
        for tensor in live:
            tensor.zero_()
        assert all(torch.equal(copy, values) for copy, values in zip(copies, expected, strict=True))
    needed = 4 * sum(lengths)
    assert len(made) > 1
    assert all(size & (size - 1) == 0 for size in made)
    assert needed <= area.num_bytes == sum(made) < 1.3 * needed
