"""Copies between the device and the host: on a CPU at once, on CUDA on a stream for each direction."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch

from megatron.core import host_memory
from megatron.core.host_memory import Copied, CudaHostCopies, HostCopies


def test_bytes_are_counted_by_direction_and_targets_are_filled() -> None:
    copies = HostCopies()
    values = torch.arange(6.0)
    out = copies.to_host(values)
    assert out.tensor.data_ptr() != values.data_ptr()
    target = torch.empty(6)
    assert copies.to_host(values, target).tensor is target
    back = copies.to_device(out.tensor[:2])
    assert copies.to_device(values[:2], target[:2]).tensor.tolist() == back.tensor.tolist() == [0.0, 1.0]
    assert torch.equal(target, values)
    assert (copies.bytes_out, copies.bytes_in) == (48, 16)
    copies.wait(back)
    copies.wait_on_host(back)
    copies.free(values)
    assert values.untyped_storage().nbytes() == 0


class Stream:
    """Note what a stream is given; the one that is entered last is given the copies."""

    current: Stream

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self._log = name, log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: Event) -> None:
        self._log.append(f"{self.name} waits for the copy on {event.stream}")

    def record_event(self) -> Event:
        return Event(self.name, self._log)


class Event:
    """Stand in for an event at the end of a copy."""

    def __init__(self, stream: str, log: list[str]) -> None:
        self.stream, self._log = stream, log

    def synchronize(self) -> None:
        self._log.append(f"the host waits for the copy on {self.stream}")


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace streams and pinned memory by those of this file; return what happens."""
    log: list[str] = []
    names = iter(("out", "in"))
    main = Stream("the current stream", log)

    def enter(stream: Stream) -> AbstractContextManager[None]:
        log.append(f"copy on {stream.name}")
        return nullcontext()

    def make(num_bytes: int) -> torch.Tensor:
        log.append("pinned memory")
        return torch.empty(num_bytes, dtype=torch.uint8)

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: Stream(next(names), log))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: main)
    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(host_memory, "_pinned", make)
    return log


def test_cuda_copies_follow_what_is_computed_on_streams_of_their_own(log: list[str]) -> None:
    copies = CudaHostCopies(torch.device("cpu"))
    values = torch.arange(6.0)
    out = copies.to_host(values)
    assert torch.equal(out.tensor, values)
    assert log == ["pinned memory", "out waits for the current stream", "copy on out"]
    log.clear()
    target = torch.empty(6)
    assert copies.to_host(values + 1.0, target).tensor is target
    assert torch.equal(target, values + 1.0)
    assert log == ["out waits for the current stream", "copy on out"]
    log.clear()
    back = copies.to_device(out.tensor)
    assert torch.equal(back.tensor, values)
    assert copies.to_device(target, back.tensor).tensor is back.tensor
    assert torch.equal(back.tensor, target)
    assert log == ["in waits for the current stream", "copy on in"] * 2


def test_work_and_the_host_wait_for_a_copy_that_may_not_be_done(log: list[str]) -> None:
    copies = CudaHostCopies(torch.device("cpu"))
    out, back = copies.to_host(torch.ones(3)), copies.to_device(torch.ones(3))
    log.clear()
    copies.wait(back)
    copies.wait_on_host(out)
    copies.wait(Copied(torch.ones(3)))
    copies.wait_on_host(Copied(torch.ones(3)))
    assert log == ["the current stream waits for the copy on in", "the host waits for the copy on out"]
