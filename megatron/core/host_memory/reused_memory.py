"""Memory of a processor for one large tensor after another.

The C library returns memory of this size to the system when it is freed, and every page of the next tensor is mapped
and zeroed anew: for logits that takes longer than their product.
"""

from __future__ import annotations

import weakref

import numpy as np
import torch

MIN_BYTES = 32 << 20
"""glibc keeps smaller blocks for itself when they are freed."""


class ReusedMemory:
    """Lend one block of memory to tensors that follow each other; those that overlap in time have blocks of their own.

    A block is lent again when the last tensor that views it is gone.
    """

    def __init__(self) -> None:
        self._spare: np.ndarray | None = None

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialized tensor on the CPU."""
        size = torch.Size(shape).numel() * dtype.itemsize
        if size < MIN_BYTES:
            return torch.empty(shape, dtype=dtype)
        block, self._spare = self._spare, None
        if block is None or block.nbytes < size:
            block = torch.empty(size, dtype=torch.uint8).numpy()
        # The tensor's storage owns the view, which dies with it.
        view = block[:size]
        weakref.finalize(view, self._take_back, block).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def _take_back(self, block: np.ndarray) -> None:
        if self._spare is None or self._spare.nbytes < block.nbytes:
            self._spare = block
