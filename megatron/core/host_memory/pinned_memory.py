"""Pinned memory for many tensors, cut out of large blocks: torch rounds each block up to a power of two."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

_BLOCKS = tuple(2**exponent for exponent in range(26, 31))
_SMALLEST_OF_MANY = 2**20
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
        needed = _aligned(tensor.nbytes)
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


@dataclass(frozen=True)
class Packing:
    """Say in which block each tensor of a list lies and at which byte of it, and how large the blocks are."""

    places: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]


def pack(sizes: Sequence[int]) -> Packing:
    """Return where tensors of so many bytes lie in blocks of powers of two, which together are hardly larger.

    The blocks are never larger than the one power of two that holds all tensors. One tensor alone has one block.
    """
    total = sum(map(_aligned, sizes))
    whole = max(1 << max(total - 1, 0).bit_length(), _ALIGNMENT)
    largest = [2**exponent for exponent in range(_BLOCKS[-1].bit_length() - 1, whole.bit_length())]
    plans = [_packed_into(sizes, [whole]), *(_packed_into(sizes, [], limit) for limit in largest or [whole])]
    return min((plan for plan in plans if plan is not None), key=lambda plan: (sum(plan.blocks), len(plan.blocks)))


def side_by_side(sizes: Sequence[int]) -> Packing:
    """Return where tensors lie in one block that is no larger than they are together."""
    total = sum(map(_aligned, sizes))
    packing = _packed_into(sizes, [total])
    assert packing is not None
    return packing


def pack_again(sizes: Sequence[int], blocks: Sequence[int]) -> Packing | None:
    """Return where tensors lie in blocks that are there, None where some found no place.

    The list that `pack` made the blocks for always finds one: they are opened one after the other, as they were made.
    """
    return _packed_into(sizes, [], kept=blocks) or _packed_into(sizes, blocks)


def _packed_into(
    sizes: Sequence[int], blocks: Sequence[int], limit: int = 0, kept: Sequence[int] = ()
) -> Packing | None:
    """Put the largest tensor first, each where it leaves least.

    What fits nowhere opens the next blocks of ``kept``, or else has one made: up to a ``limit``, for what is left.
    """
    made, used, closed = list(blocks), [0] * len(blocks), list(reversed(kept))
    places = [(0, 0)] * len(sizes)
    left = sum(map(_aligned, sizes))
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        needed = _aligned(sizes[number])
        if not needed:
            continue
        fitting = [block for block, size in enumerate(made) if size - used[block] >= needed]
        while closed and not fitting:
            made.append(closed.pop())
            used.append(0)
            fitting = [len(made) - 1] if made[-1] >= needed else []
        if not fitting:
            if not limit:
                return None
            of_rest = min(1 << (left.bit_length() - 1), limit)
            made.append(max(1 << (needed - 1).bit_length(), of_rest, _SMALLEST_OF_MANY))
            used.append(0)
            fitting = [len(made) - 1]
        block = min(fitting, key=lambda block: made[block] - used[block])
        places[number] = block, used[block]
        used[block] += needed
        left -= needed
    return Packing(tuple(places), (*made, *reversed(closed)))


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


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
