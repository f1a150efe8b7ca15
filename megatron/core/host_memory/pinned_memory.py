"""Pinned memory for many tensors, cut out of large blocks: torch rounds each block up to a power of two."""

from __future__ import annotations

from collections.abc import Callable

import torch

_FIRST_BLOCK, _LARGEST_BLOCK = 2**26, 2**30
_ALIGNMENT = 256
_SHARE_WASTED = 7
"""A block of a tensor's own may be so much larger than it: a seventh of the tensor."""


class PinnedMemory:
    """Give memory to tensors that are made one after the other, and freed in about the reverse order.

    Blocks are powers of two, each twice as large as the last up to 1 GiB. A block is the allocator's again when the
    last tensor in it has gone. What fills most of a power of two has a block of its own, and so has what fills more
    than half of the largest. ``make`` makes a block of so many bytes, pinned by default.
    """

    def __init__(self, make: Callable[[int], torch.Tensor] | None = None) -> None:
        self._make = make or _pinned
        self._size = _FIRST_BLOCK
        self._rest: torch.Tensor | None = None

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a contiguous tensor's values."""
        assert tensor.is_contiguous(), "a copy would lie in another order"
        needed = tensor.nbytes
        wasted = (1 << max(needed - 1, 0).bit_length()) - needed
        if wasted <= needed // _SHARE_WASTED or needed > _LARGEST_BLOCK // 2:
            return self._make(needed).view(tensor.dtype).view(tensor.shape)
        if self._rest is None or len(self._rest) < needed:
            # The old one goes first, where nobody else has it.
            self._rest = None
            while self._size < needed:
                self._size *= 2
            self._rest = self._make(self._size)
            self._size = min(2 * self._size, _LARGEST_BLOCK)
        own, self._rest = self._rest[:needed], self._rest[-(-needed // _ALIGNMENT) * _ALIGNMENT :]
        return own.view(tensor.dtype).view(tensor.shape)


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
