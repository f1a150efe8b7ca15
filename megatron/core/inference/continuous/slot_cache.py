"""Keys and values of rows that begin and end independently: each row has a slot, and a length of its own."""

from __future__ import annotations

import torch

from megatron.core.transformer.kv_cache import KeyValueCache

_FEWEST_COLUMNS = 64


class SlotCache(KeyValueCache):
    """Keep every layer's keys and values of some rows; a pass shows the model the rows of neighbouring slots.

    The buffers grow with the rows and with the longest of them, by doubling. A column that no row has written is 0, so
    that what a mask hides is finite.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._num_slots = 0
        self._rows = slice(0, 0)
        self._columns = torch.empty(0, 0, dtype=torch.long)
        self._end = 0

    def begin_pass(self, first_slot: int, columns: torch.Tensor, end: int) -> None:
        """Say where the next pass writes: row ``i`` into ``columns[i]`` of slot ``first_slot + i``; and up to which
        column it reads.

        A column of -1 is written to a place that no pass reads. Shapes: ``columns: [b, s]``.
        """
        self._rows = slice(first_slot, first_slot + columns.shape[0])
        self._columns = columns
        self._end = end
        self.grow(self._rows.stop, end)

    def update(self, layer_number: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write the new positions of a layer and return views of the rows' keys and values.

        Shapes: ``[s, b, g/tp, d] -> [end, b, g/tp, d]``.
        """
        if layer_number not in self._buffers:
            shape = (self._num_slots, self.max_length + 1)
            self._buffers[layer_number] = (
                key.new_zeros((*shape, *key.shape[2:])),
                value.new_zeros((*shape, *value.shape[2:])),
            )
        slots = torch.arange(self._rows.start, self._rows.stop, device=key.device)[:, None]
        seen = []
        for buffer, new in zip(self._buffers[layer_number], (key, value), strict=True):
            buffer[slots, self._columns] = new.transpose(0, 1)
            seen.append(buffer[self._rows, : self._end].transpose(0, 1))
        return seen[0], seen[1]

    def move(self, source: int, target: int, length: int) -> None:
        """Make the slot ``target`` what the first ``length`` columns of ``source`` are."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer[target, :length] = buffer[source, :length]

    def clear(self, slot: int) -> None:
        """Forget what a slot holds: a number that is not finite would spoil what a mask hides."""
        for buffers in self._buffers.values():
            for buffer in buffers:
                buffer[slot] = 0

    def grow(self, num_slots: int, length: int = 0) -> None:
        """Make room for so many slots and so many columns of each."""
        if num_slots <= self._num_slots and length <= self.max_length:
            return
        self._num_slots = max(self._num_slots, 1 << (num_slots - 1).bit_length())
        self.max_length = max(self.max_length, _FEWEST_COLUMNS, 1 << (length - 1).bit_length())
        for layer_number, buffers in self._buffers.items():
            grown = []
            for old in buffers:
                new = old.new_zeros((self._num_slots, self.max_length + 1, *old.shape[2:]))
                # All but the last column, which is the place that no pass reads.
                new[: old.shape[0], : old.shape[1] - 1] = old[:, :-1]
                grown.append(new)
            self._buffers[layer_number] = (grown[0], grown[1])
