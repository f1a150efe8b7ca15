"""Asynchronous saves: a staging buffer for the tensors, and a background thread that writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from megatron.core.host_memory import Packing, pack, pack_again, side_by_side

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """Run ``work`` in a thread from now on; its result, or its error, waits for whoever asks.

    The thread never keeps a process alive: a process that ends before the work does leaves it half done.
    """

    def __init__(self, work: Callable[[], Result], name: str) -> None:
        self._work = work
        self._results: list[Result] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Return whether `result` would return, or raise, at once."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the work, whatever it is."""
        self._thread.join()

    def result(self) -> Result:
        """Wait for the work and return what it returned.

        Raises:
            Exception: what the work raised.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except Exception as error:  # noqa: BLE001 raised by `result`, in the thread that asks for it
            self._error = error


class StagingArea:
    """Copy tensors into host memory that is kept for the next copy: a series of saves allocates once.

    Where the tensors are on a device the memory is page-locked, in blocks of powers of two: torch rounds each block up
    to one. ``synchronize`` waits for the device's copies. ``make`` returns so many bytes, page-locked or not.
    """

    def __init__(
        self, synchronize: Callable[[], None], make: Callable[[int, bool], torch.Tensor] | None = None
    ) -> None:
        self._synchronize = synchronize
        self._make = make or _empty
        self._blocks: list[torch.Tensor] = []
        self._packed: tuple[list[int], Packing] | None = None

    @property
    def num_bytes(self) -> int:
        return sum(block.numel() for block in self._blocks)

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the tensors that stay as they are until the next call."""
        sizes = [tensor.nbytes for tensor in tensors]
        if self._packed is None or self._packed[0] != sizes:
            packing = pack_again(sizes, [block.numel() for block in self._blocks])
            if packing is None:
                self._blocks = []  # the old memory is free before the new one is taken
                is_on_device = any(tensor.device.type != "cpu" for tensor in tensors)
                packing = pack(sizes) if is_on_device else side_by_side(sizes)
                self._blocks = [self._make(size, is_on_device) for size in packing.blocks]
            self._packed = sizes, packing
        copies = []
        for tensor, (number, start) in zip(tensors, self._packed[1].places):
            memory = self._blocks[number][start : start + tensor.nbytes] if tensor.nbytes else _empty(0, False)
            copies.append(memory.view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor, non_blocking=True)
        self._synchronize()
        return copies


def _empty(num_bytes: int, is_pinned: bool) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=is_pinned)
