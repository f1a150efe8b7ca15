"""Copies between a device and the machine's memory that run beside the work of both."""

from __future__ import annotations

from typing import Protocol

import torch


class CopyMark(Protocol):
    """Stand for the moment at which a copy is done."""

    def wait(self) -> None:
        """Let the host wait for it."""


class CopyStream(Protocol):
    """Run copies one after another, in the order in which they were asked for."""

    def follow(self) -> None:
        """Let later copies wait for what the device has been given to do."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor into another of its shape and dtype; the copy may still run on return."""

    def mark(self) -> CopyMark:
        """Return what the host can wait for until the copies so far are done."""

    def join(self) -> None:
        """Let what the device is given later wait for the copies so far."""


class ImmediateCopies:
    """Copy at once: where the host computes, there is nothing beside which to copy."""

    def follow(self) -> None:
        """Do nothing: nothing is under way."""

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor into another."""
        target.copy_(source)

    def mark(self) -> CopyMark:
        """Return what has been reached."""
        return self

    def wait(self) -> None:
        """Do nothing: every copy is done."""

    def join(self) -> None:
        """Do nothing: every copy is done."""


class CudaCopies:
    """Copy on a CUDA stream of their own; the memory of the host must be pinned, or each copy is waited for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def follow(self) -> None:
        """Let later copies wait for the current stream."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Launch a copy, for which the host does not wait."""
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)

    def mark(self) -> CopyMark:
        """Return an event behind the copies so far."""
        return _CudaMark(self._stream.record_event())

    def join(self) -> None:
        """Let the current stream wait for the copies so far."""
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


class _CudaMark:
    def __init__(self, event: torch.cuda.Event) -> None:
        self._event = event

    def wait(self) -> None:
        self._event.synchronize()
