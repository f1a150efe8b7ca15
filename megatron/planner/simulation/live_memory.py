"""The device memory that is live, storage by storage, and what holds it."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor

HOLDERS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers")
"""What memory is for: ``buffers`` is all that has no other name, work space and messages among it."""
_BLOCK_BYTES = 512
"""Torch's allocator gives memory in blocks of this size."""
_GRADIENT_FILES = "megatron/core/distributed/"


class LiveMemory:
    """Follow the storages of fake CUDA tensors from the first sight of each to its end.

    ``bytes_by_holder`` is in the order of ``HOLDERS``.
    """

    def __init__(self) -> None:
        self.bytes_by_holder = [0] * len(HOLDERS)
        self.logits_widths = range(0)
        self._live: dict[int, tuple[int, int]] = {}

    @property
    def num_bytes(self) -> int:
        """Return all that is live."""
        return sum(self.bytes_by_holder)

    def see(self, tensor: torch.Tensor, phase: str, where: str) -> bool:
        """Count a tensor's storage if it is new, and return whether it is."""
        if not isinstance(tensor, FakeTensor) or tensor.fake_device.type != "cuda":
            return False
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._live:
            return False
        num_bytes = -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        self._set(key, num_bytes, HOLDERS.index(self._holder(tensor, phase, where)))
        weakref.finalize(storage, self._free, key)
        return True

    def assign(self, tensors: Iterable[torch.Tensor], holder: str) -> None:
        """Say what tensors that are live are for."""
        for tensor in tensors:
            key = tensor.untyped_storage()._cdata
            if key in self._live:
                num_bytes, _ = self._live[key]
                self._free(key)
                self._set(key, num_bytes, HOLDERS.index(holder))

    def forget(self, tensor: torch.Tensor) -> None:
        """Count a tensor's memory as free, though the tensor lives."""
        self._free(tensor.untyped_storage()._cdata)

    def remember(self, tensor: torch.Tensor, holder: str) -> None:
        """Count memory again that was forgotten, if it was."""
        if tensor.untyped_storage()._cdata in self._live:
            return
        num_bytes = -(-tensor.untyped_storage().nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES
        self._set(tensor.untyped_storage()._cdata, num_bytes, HOLDERS.index(holder))

    def resized(self, storage: torch.UntypedStorage) -> bool:
        """Count what a storage has now, if it is followed, and return whether it is."""
        if storage._cdata not in self._live:
            return False
        holder = self._live[storage._cdata][1]
        self._free(storage._cdata)
        self._set(storage._cdata, -(-storage.nbytes() // _BLOCK_BYTES) * _BLOCK_BYTES, holder)
        return True

    def _holder(self, tensor: torch.Tensor, phase: str, where: str) -> str:
        if _GRADIENT_FILES in where:
            return "gradients"
        if phase in ("forward", "backward") and tensor.dim() and tensor.shape[-1] in self.logits_widths:
            return "logits"
        return "activations" if phase == "forward" else "buffers"

    def _set(self, key: int, num_bytes: int, holder: int) -> None:
        self._live[key] = (num_bytes, holder)
        self.bytes_by_holder[holder] += num_bytes

    def _free(self, key: int) -> None:
        num_bytes, holder = self._live.pop(key, (0, 0))
        self.bytes_by_holder[holder] -= num_bytes
