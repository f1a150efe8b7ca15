"""What lets a save go on beside training: a copy of the tensors that stays as it is, and a thread that works."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

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

    The memory is page-locked where the tensors are on a device; ``synchronize`` waits for the device's copies.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Return the size of the memory that is held."""
        return self._memory.numel()

    def copy(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies of the tensors that stay as they are until the next call.

        Tensors of wide types must come first, so that each is aligned.
        """
        needed = sum(tensor.nbytes for tensor in tensors)
        if self._memory.numel() < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old memory is free before the new one is taken
            is_on_device = any(tensor.device.type != "cpu" for tensor in tensors)
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=is_on_device)
        copies = []
        start = 0
        for tensor in tensors:
            end = start + tensor.nbytes
            copies.append(self._memory[start:end].view(tensor.dtype).view(tensor.shape))
            copies[-1].copy_(tensor, non_blocking=True)
            start = end
        self._synchronize()
        return copies
