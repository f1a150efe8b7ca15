"""Copies between a device and the machine's memory that run beside the work of both."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.core.host_memory.pinned_memory import PinnedMemory


@dataclass(frozen=True, eq=False)
class Copied:
    """Hold a copy that is there when ``done`` has happened; None says that it is there."""

    tensor: torch.Tensor
    done: torch.cuda.Event | None = None


class HostCopies:
    """Copy tensors to the machine's memory and back: on a CPU, which has one memory, at once.

    Copies in one direction follow one another: who waits for one waits for those before it. ``bytes_out`` and
    ``bytes_in`` count what left the device and what came back.
    """

    def __init__(self) -> None:
        self.bytes_out = 0
        self.bytes_in = 0

    def to_host(self, tensor: torch.Tensor, target: torch.Tensor | None = None) -> Copied:
        """Begin a copy, to a new tensor or into one of its shape and dtype.

        It holds what the device has been given to compute so far. Until it is done nothing may write to the tensor, and
        somebody must hold it.
        """
        self.bytes_out += tensor.nbytes
        return self._copy_out(tensor, target)

    def to_device(self, tensor: torch.Tensor, target: torch.Tensor | None = None) -> Copied:
        """Begin a copy back, to a new tensor or into one; work that reads it must come after `wait`."""
        self.bytes_in += tensor.nbytes
        return self._copy_in(tensor, target)

    def free(self, tensor: torch.Tensor) -> None:
        """Give back the device's memory behind a tensor that stays."""
        tensor.untyped_storage().resize_(0)

    def wait(self, copied: Copied) -> None:
        """Let the work that is given to the device from here on begin when a copy is done; the host does not wait."""

    def wait_on_host(self, copied: Copied) -> None:
        """Return when a copy is done."""

    def _copy_out(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        return Copied(tensor.clone() if target is None else target.copy_(tensor))

    def _copy_in(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        return Copied(tensor.clone() if target is None else target.copy_(tensor))


class CudaHostCopies(HostCopies):
    """Copy on two streams of their own, one for each direction, from and to pinned memory.

    The machine's memory that is given must be pinned too, or the host waits for each copy.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._memory = PinnedMemory()
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wait(self, copied: Copied) -> None:
        """Let the current stream wait for a copy."""
        if copied.done is not None:
            torch.cuda.current_stream(self._device).wait_event(copied.done)

    def wait_on_host(self, copied: Copied) -> None:
        """Wait for the event behind a copy."""
        if copied.done is not None:
            copied.done.synchronize()

    def _copy_out(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        return self._copy(tensor, self._memory.empty_like(tensor) if target is None else target, self._out)

    def _copy_in(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        return self._copy(tensor, torch.empty_like(tensor, device=self._device) if target is None else target, self._in)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream) -> Copied:
        # What is copied has been computed by then, and memory that is written to is no longer read.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return Copied(target, stream.record_event())
