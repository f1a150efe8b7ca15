"""Copies between a GPU that is not there and the machine's memory: when each begins, and when the GPU waits."""

from __future__ import annotations

import torch

from megatron.core.device import Copied, HostCopies
from megatron.core.process_group import CollectiveCall
from megatron.dry_run.recorder import Recorder


class RecordedCopies(HostCopies):
    """Tell the recorder of copies as of communications of one rank, over the axis ``host``."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def wait(self, copied: Copied) -> None:
        """Note that the device waits."""
        self._recorder.end_transfer(copied)

    def _copy_out(self, tensor: torch.Tensor) -> Copied:
        return self._begin("copy_to_host", tensor.new_empty(tensor.shape, device="cpu"))

    def free(self, tensor: torch.Tensor) -> None:
        """Note that the memory is free; it keeps its size, of which nothing is there."""
        self._recorder.memory.forget(tensor)

    def _copy_in(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        if target is None:
            return self._begin("copy_to_device", tensor.new_empty(tensor.shape, device="cuda"))
        self._recorder.memory.remember(target, "weights")
        return self._begin("copy_to_device", target)

    def _begin(self, operation: str, target: torch.Tensor) -> Copied:
        copied = Copied(target)
        self._recorder.communicate(CollectiveCall(operation, ("host",), 1, target.nbytes))
        self._recorder.begin_transfer(copied)
        return copied
