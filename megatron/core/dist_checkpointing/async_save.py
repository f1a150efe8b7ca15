"""Asynchronous saves: a staging buffer for the tensors, and a background thread that writes them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from megatron.core.host_memory import Packing, pack, pack_again, side_by_side

Result = TypeVar("Result")


class BackgroundTask(Generic[Result]):
    """Task that runs ``work`` in a background thread and keeps its result or error.

    The daemon thread does not keep the process alive: if the process exits first, the work is left incomplete.
    """

    def __init__(self, work: Callable[[], Result], name: str) -> None:
        self._work = work
        self._results: list[Result] = []
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Return whether `result` would not block."""
        return not self._thread.is_alive()

    def wait(self) -> None:
        """Wait for the end of the work, without raising its error."""
        self._thread.join()

    def result(self) -> Result:
        """Wait for the work and return its result.

        Raises:
            Exception: the error that the work raised.
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
    """Host memory into which tensors are copied, reused between copies, so that a series of saves allocates once.

    For device tensors the memory is pinned, in blocks of powers of two, because torch rounds each block up to one.
    ``synchronize`` waits for the device's copies. ``make`` allocates a number of bytes, pinned or not.
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
        """Return copies of the tensors that stay valid until the next call."""
        sizes = [tensor.nbytes for tensor in tensors]
        if self._packed is None or self._packed[0] != sizes:
            packing = pack_again(sizes, [block.numel() for block in self._blocks])
            if packing is None:
                self._blocks = []  # free the old memory before allocating the new memory
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
