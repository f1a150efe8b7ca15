"""KV cache: keys and values of the positions that a model has already processed, and the states of recurrent layers."""

from __future__ import annotations

import torch


class KeyValueCache:
    """Keys and values of every layer for up to ``max_length`` positions of one batch.

    A layer's buffers are allocated at full length at its first update, with the dtype, device and heads of the given
    tensors, so that the cache is independent of the model.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length = max_length
        self._buffers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._lengths: dict[int, int] = {}
        self._states: dict[int, tuple[torch.Tensor, ...]] = {}

    def length(self, layer_number: int) -> int:
        return self._lengths.get(layer_number, 0)

    def update(self, layer_number: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the new positions of a layer and return views of all of its keys and values.

        Multi-head latent attention (MLA) stores latent vectors and rotary keys instead, each as one head.

        Shapes: ``[s, b, g/tp, d] -> [all, b, g/tp, d]``; keys and values may differ in ``d``.
        """
        if layer_number not in self._buffers:
            self._buffers[layer_number] = (
                key.new_empty((self.max_length, *key.shape[1:])),
                value.new_empty((self.max_length, *value.shape[1:])),
            )
        keys, values = self._buffers[layer_number]
        start = self.length(layer_number)
        end = start + key.shape[0]
        assert end <= self.max_length, f"{end} positions in a cache of {self.max_length}"
        keys[start:end] = key
        values[start:end] = value
        self._lengths[layer_number] = end
        return keys[:end], values[:end]

    def states(self, layer_number: int) -> tuple[torch.Tensor, ...] | None:
        """Return the states of a recurrent layer after the last position, or None before the first.

        Shapes: ``-> [b, ...]`` each.
        """
        return self._states.get(layer_number)

    @property
    def padding(self) -> torch.Tensor | None:
        """Return the number of leading columns of each row that this pass must not process. Shapes: ``-> [b]``."""
        return None

    def set_states(self, layer_number: int, states: tuple[torch.Tensor, ...]) -> None:
        self._states[layer_number] = states

    def extend(self, max_length: int) -> None:
        """Make room for ``max_length`` positions; the stored ones are kept."""
        self.max_length = max_length
        for layer_number, buffers in self._buffers.items():
            length = self.length(layer_number)
            key, value = (buffer.new_empty((max_length, *buffer.shape[1:])) for buffer in buffers)
            for new, old in zip((key, value), buffers, strict=True):
                new[:length] = old[:length]
            self._buffers[layer_number] = (key, value)

    def select_rows(self, rows: torch.Tensor) -> None:
        """Set row ``i`` of the batch to the previous row ``rows[i]``; a row may be selected several times."""
        for layer_number, buffers in self._buffers.items():
            length = self.length(layer_number)
            key, value = (buffer.new_empty((self.max_length, len(rows), *buffer.shape[2:])) for buffer in buffers)
            for new, old in zip((key, value), buffers, strict=True):
                torch.index_select(old[:length], 1, rows, out=new[:length])
            self._buffers[layer_number] = (key, value)
        for layer_number, states in self._states.items():
            self._states[layer_number] = tuple(state.index_select(0, rows) for state in states)
