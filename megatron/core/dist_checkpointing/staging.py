"""The copy of a rank's tensors that is written while the tensors themselves change again."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron.core.dist_checkpointing.storage import ShardEntry


class StagingArea:
    """Copy entries into host memory that is kept for the next copy: a series of saves allocates once.

    The memory is page-locked where the tensors are on a device; ``synchronize`` waits for the device's copies.
    """

    def __init__(self, synchronize: Callable[[], None]) -> None:
        self._synchronize = synchronize
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Return the size of the memory that is held."""
        return self._memory.numel()

    def copy(self, entries: Sequence[ShardEntry]) -> list[ShardEntry]:
        """Return entries of the same keys and values that stay as they are until the next call.

        Entries of wide types must come first, so that each is aligned.
        """
        needed = sum(entry.values.nbytes for entry in entries)
        if self._memory.numel() < needed:
            self._memory = torch.empty(0, dtype=torch.uint8)  # the old memory is free before the new one is taken
            is_on_device = any(entry.values.device.type != "cpu" for entry in entries)
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=is_on_device)
        copies = []
        start = 0
        for entry in entries:
            end = start + entry.values.nbytes
            values = self._memory[start:end].view(entry.values.dtype).view(entry.values.shape)
            values.copy_(entry.values, non_blocking=True)
            copies.append(ShardEntry(entry.key, values))
            start = end
        self._synchronize()
        return copies
