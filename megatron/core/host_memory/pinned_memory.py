"""Pinned memory for many tensors, cut out of large blocks: torch rounds each block up to a power of two."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass

import torch

_BLOCKS = tuple(2**exponent for exponent in range(26, 31))
_ALIGNMENT = 256
_SHARE_WASTED = 7
"""A block may be so much larger than the tensors that fill it: a seventh of them."""


class PinnedMemory:
    """Give memory to tensors that are made one after the other.

    A tensor has a block of its own where it fills most of a power of two. Otherwise it lies in the smallest block, of
    64 MiB to 1 GiB, that tensors of its size fill as far; where none is, it has its own. With the last tensor in
    it a block goes back to the allocator, which gives it out anew when the copies from and to it are done.
    ``make`` makes a block of so many bytes, pinned by default.
    """

    def __init__(self, make: Callable[[int], torch.Tensor] | None = None) -> None:
        self._make = make or _pinned
        self._open: dict[int, _OpenBlock] = {}

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return memory for a contiguous tensor's values."""
        assert tensor.is_contiguous(), "a copy would lie in another order"
        needed = -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        size = _shared_size(needed)
        if size is None:
            return self._make(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
        block = self._open.get(size)
        storage = None if block is None else block.storage()
        if block is None or storage is None or block.used + needed > size:
            storage = self._make(size).untyped_storage()
            block = self._open[size] = _OpenBlock(weakref.ref(storage))
        start = block.used // tensor.element_size()
        block.used += needed
        own = torch.empty(0, dtype=tensor.dtype, device=storage.device)
        return own.set_(storage, start, tensor.shape, tensor.stride())


@dataclass
class _OpenBlock:
    """Hold what is given out of a block, which only its tensors keep alive."""

    storage: weakref.ref[torch.UntypedStorage]
    used: int = 0


def _shared_size(needed: int) -> int | None:
    """Return the size of the block that a tensor shares with others, or None where it has its own."""
    if not needed or _is_filled(1 << (needed - 1).bit_length(), needed):
        return None
    return next((size for size in _BLOCKS if size >= needed and _is_filled(size, needed)), None)


def _is_filled(size: int, needed: int) -> bool:
    """Return whether as many tensors as a block holds leave no more than a seventh of theirs."""
    rest = size % needed
    return rest <= (size - rest) // _SHARE_WASTED


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
