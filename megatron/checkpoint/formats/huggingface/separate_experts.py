"""Read experts that a folder stores stacked, as transformers has them in memory, like those of other folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from megatron.checkpoint.formats.huggingface.decoder_layers import ExpertNames
from megatron.checkpoint.formats.huggingface.linked_tensors import StoredWeights
from megatron.checkpoint.formats.huggingface.weight_files import WeightEntry
from megatron.core.sharding import Box


def with_separate_experts(weights: StoredWeights, names: ExpertNames) -> StoredWeights:
    """Return weights in which no tensor stacks the projections of a layer's experts, ``[experts, out, in]``."""
    endings = tuple(f".{names.experts}.{stacked}" for stacked in _parts_of(names))
    found = [name for name, entry in weights.entries.items() if name.endswith(endings) and len(entry.shape) == 3]
    return SeparateExperts(weights, names, found) if found else weights


def _parts_of(names: ExpertNames) -> dict[str, tuple[str, ...]]:
    return {"gate_up_proj": (names.gate, names.up), "down_proj": (names.down,)}


class SeparateExperts:
    """Weights in which each projection of each expert of ``stacked`` is a tensor; the others are unchanged."""

    def __init__(self, weights: StoredWeights, names: ExpertNames, stacked: Sequence[str]) -> None:
        self.folder, self._weights = weights.folder, weights
        self.entries = {name: entry for name, entry in weights.entries.items() if name not in stacked}
        self._origins: dict[str, tuple[str, int, int]] = {}
        for name in stacked:
            entry = weights.entries[name]
            for part, origin, rows in _parts(name, entry, names):
                self._origins[part] = origin
                self.entries[part] = WeightEntry(entry.file, (rows, entry.shape[2]), entry.dtype, entry.start)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if name not in self._origins:
            return self._weights.read(name, box)
        stacked, expert, start = self._origins[name]
        first_row, first_column = box.offset
        return self._weights.read(stacked, Box((expert, start + first_row, first_column), (1, *box.shape))).squeeze(0)


def _parts(name: str, entry: WeightEntry, names: ExpertNames) -> Iterator[tuple[str, tuple[str, int, int], int]]:
    """Yield the name of each projection, its stacked tensor, expert and first row in it, and its number of rows."""
    experts, _, kind = name.rpartition(".")
    parts = _parts_of(names)[kind]
    rows = entry.shape[1] // len(parts)
    for expert in range(entry.shape[0]):
        for number, part in enumerate(parts):
            yield f"{experts}.{expert}.{part}.weight", (name, expert, number * rows), rows
