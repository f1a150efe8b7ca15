"""Copies between a simulated GPU and the machine's memory: when each begins, and who waits for it."""

from __future__ import annotations

import torch

from megatron.core.host_memory import Copied, HostCopies
from megatron.planner.simulation.recorder import Recorder
from megatron.planner.simulation.step_record import TO_DEVICE, TO_HOST


class RecordedCopies(HostCopies):
    """Tell the recorder of copies, of which none is made."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder
        self._under_way: dict[str, list[Copied]] = {TO_HOST: [], TO_DEVICE: []}

    def wait(self, copied: Copied) -> None:
        """Note that the device waits, for the copies before this one too."""
        for queue in self._under_way.values():
            while copied in queue:
                self._recorder.end_transfer(queue.pop(0))

    def wait_on_host(self, copied: Copied) -> None:
        """Note that the host waits, and what it launches afterwards with it."""
        self._recorder.wait("copies")
        self.wait(copied)

    def free(self, tensor: torch.Tensor) -> None:
        """Note that the memory is free; it keeps its size, of which nothing is there."""
        self._recorder.memory.forget(tensor)

    def _copy_out(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        target = tensor.new_empty(tensor.shape, device="cpu") if target is None else target
        return self._begin(target, TO_HOST)

    def _copy_in(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        if target is None:
            target = tensor.new_empty(tensor.shape, device="cuda")
        else:
            self._recorder.memory.remember(target, "weights")
        return self._begin(target, TO_DEVICE)

    def _begin(self, target: torch.Tensor, direction: str) -> Copied:
        copied = Copied(target)
        self._under_way[direction].append(copied)
        self._recorder.begin_copy(copied, direction, target.nbytes)
        return copied
