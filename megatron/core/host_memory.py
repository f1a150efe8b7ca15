"""Host memory for tensors: pinned blocks, asynchronous host-device copies, and a reused CPU workspace.

Pinned memory for many tensors is packed into large blocks, because torch rounds each block up to a power of two.
The CPU workspace exists because the C library returns a freed block of this size to the system. Every page of the next
tensor would be mapped and zeroed again, which for logits takes longer than their matmul.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

_BLOCKS = tuple(2**exponent for exponent in range(26, 31))
_SMALLEST_OF_MANY = 2**20
_ALIGNMENT = 256
_SHARE_WASTED = 7
"""A block may exceed the total of its tensors by a seventh of that total."""


class PinnedMemory:
    """Allocator of pinned memory for a sequence of tensors.

    A tensor gets its own block if it fills most of a power of two. Otherwise it is placed in the smallest block, of
    64 MiB to 1 GiB, that tensors of its size would fill as well; if there is none, it gets its own block. When the last
    tensor in a block is freed, the block returns to torch's allocator, which reuses it once the copies from and to it
    have finished. ``make`` allocates a block of a number of bytes, by default pinned.
    """

    def __init__(self, make: Callable[[int], torch.Tensor] | None = None) -> None:
        self._make = make or _pinned
        self._open: dict[int, _OpenBlock] = {}

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Allocate memory for the values of a contiguous tensor."""
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
    """State of a block that is being filled; only its tensors keep the block alive."""

    storage: weakref.ref[torch.UntypedStorage]
    used: int = 0


@dataclass(frozen=True)
class Packing:
    """Placement of a list of tensors: (block, byte offset) of each tensor, and the size of each block."""

    places: tuple[tuple[int, int], ...]
    blocks: tuple[int, ...]


def pack(sizes: Sequence[int]) -> Packing:
    """Pack tensors of the given sizes in bytes into blocks of powers of two with little waste.

    The blocks are never larger in total than the single power of two that holds all tensors. A single tensor gets one
    block.
    """
    total = sum(map(_aligned, sizes))
    whole = max(1 << max(total - 1, 0).bit_length(), _ALIGNMENT)
    largest = [2**exponent for exponent in range(_BLOCKS[-1].bit_length() - 1, whole.bit_length())]
    plans = [_packed_into(sizes, [whole]), *(_packed_into(sizes, [], limit) for limit in largest or [whole])]
    return min((plan for plan in plans if plan is not None), key=lambda plan: (sum(plan.blocks), len(plan.blocks)))


def side_by_side(sizes: Sequence[int]) -> Packing:
    """Pack tensors into one block of their total size."""
    total = sum(map(_aligned, sizes))
    packing = _packed_into(sizes, [total])
    assert packing is not None
    return packing


def pack_again(sizes: Sequence[int], blocks: Sequence[int]) -> Packing | None:
    """Pack tensors into existing blocks; return None if some do not fit.

    The list that `pack` made the blocks for always fits: the blocks are opened in the order in which they were made.
    """
    return _packed_into(sizes, [], kept=blocks) or _packed_into(sizes, blocks)


def _packed_into(
    sizes: Sequence[int], blocks: Sequence[int], limit: int = 0, kept: Sequence[int] = ()
) -> Packing | None:
    """Place the largest tensors first, each in the block where it leaves the least space (best fit).

    If no open block fits, open the next blocks of ``kept``, or create a block for the remaining tensors of at most
    ``limit`` bytes.
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
    """Return the size of the block that a tensor shares with others, or None if it gets its own block."""
    if not needed or _is_filled(1 << (needed - 1).bit_length(), needed):
        return None
    return next((size for size in _BLOCKS if size >= needed and _is_filled(size, needed)), None)


def _is_filled(size: int, needed: int) -> bool:
    """Return whether a block full of tensors of this size wastes at most a seventh of their total size."""
    rest = size % needed
    return rest <= (size - rest) // _SHARE_WASTED


def _pinned(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


@dataclass(frozen=True, eq=False)
class Copied:
    """Copy that is complete once ``done`` has occurred; None means that it is complete already."""

    tensor: torch.Tensor
    done: torch.cuda.Event | None = None


class HostCopies:
    """Copies between device and host memory; on a CPU, which has only one memory, they are synchronous.

    Copies in one direction run in order: waiting for one copy also waits for all earlier ones. ``bytes_out`` and
    ``bytes_in`` count the bytes copied from the device and to the device.
    """

    def __init__(self) -> None:
        self.bytes_out = 0
        self.bytes_in = 0

    def to_host(self, tensor: torch.Tensor, target: torch.Tensor | None = None) -> Copied:
        """Start a copy to host memory, into ``target`` if it is given, which must have the same shape and dtype.

        The copy includes all work launched on the device so far. Until it is complete, the source must not be modified
        and the caller must keep a reference to it.
        """
        self.bytes_out += tensor.nbytes
        return self._copy_out(tensor, target)

    def to_device(self, tensor: torch.Tensor, target: torch.Tensor | None = None) -> Copied:
        """Start a copy to the device, into ``target`` if given; call `wait` before launching work that reads it."""
        self.bytes_in += tensor.nbytes
        return self._copy_in(tensor, target)

    def free(self, tensor: torch.Tensor) -> None:
        """Free the storage of a device tensor while keeping the tensor object."""
        tensor.untyped_storage().resize_(0)

    def wait(self, copied: Copied) -> None:
        """Make work launched on the device from here on wait for the copy; the host does not wait."""

    def wait_on_host(self, copied: Copied) -> None:
        """Block the host until a copy is complete."""

    def _copy_out(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        return Copied(tensor.clone() if target is None else target.copy_(tensor))

    def _copy_in(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        return Copied(tensor.clone() if target is None else target.copy_(tensor))


class CudaHostCopies(HostCopies):
    """Copies on two separate streams, one per direction, from and to pinned memory.

    Host memory passed by the caller must be pinned too, or the host waits for each copy.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self._device = device
        self._memory = PinnedMemory()
        self._out = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._in = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def wait(self, copied: Copied) -> None:
        """Make the current stream wait for a copy."""
        if copied.done is not None:
            torch.cuda.current_stream(self._device).wait_event(copied.done)

    def wait_on_host(self, copied: Copied) -> None:
        """Block the host on the event recorded after a copy."""
        if copied.done is not None:
            copied.done.synchronize()

    def _copy_out(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        return self._copy(tensor, self._memory.empty_like(tensor) if target is None else target, self._out)

    def _copy_in(self, tensor: torch.Tensor, target: torch.Tensor | None) -> Copied:
        return self._copy(tensor, torch.empty_like(tensor, device=self._device) if target is None else target, self._in)

    def _copy(self, source: torch.Tensor, target: torch.Tensor, stream: torch.cuda.Stream) -> Copied:
        # The source has been computed by then, and the target is no longer read.
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)
            return Copied(target, stream.record_event())


MIN_BYTES = 32 << 20
"""glibc does not return smaller freed blocks to the system."""


class ReusedMemory:
    """Cache of one block of CPU memory for successive tensors; tensors that are alive together get separate blocks.

    A block is reused when the last tensor that views it is freed.
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
        # The tensor's storage owns the view and releases it when it is freed.
        view = block[:size]
        weakref.finalize(view, self._take_back, block).atexit = False
        return torch.from_numpy(view).view(dtype).view(shape)

    def _take_back(self, block: np.ndarray) -> None:
        if self._spare is None or self._spare.nbytes < block.nbytes:
            self._spare = block
