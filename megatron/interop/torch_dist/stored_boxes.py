"""Where the values of a box of a native tensor are: which entry, and which of its values."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.sharding import Box, describe_box, flat_range_boxes, uncovered
from megatron.interop.megatron_torch.stored_values import LazyTensor
from megatron.interop.megatron_torch.torch_file import TorchFile
from megatron.interop.torch_dist.stored_metadata import Segment, StoredChunk, StoredEntry


@dataclass(frozen=True)
class StoredBox:
    """Say that the values of ``box`` are in an entry.

    The entry's values from number ``start`` on are, row by row, those of ``frame``, a box around ``box`` that may reach
    beyond the tensor. ``fields`` lead to the tensor in an entry that holds more than one.
    """

    box: Box
    frame: Box
    segment: Segment
    start: int = 0
    fields: tuple[Any, ...] = ()


def chunk_boxes(entry: StoredEntry, is_stacked: bool) -> Iterator[tuple[int, StoredBox]]:
    """Yield (layer, box) of everything that a stored tensor holds; a tensor that is not stacked has layer 0.

    Raises:
        CheckpointError: its chunks were flattened in a way that does not fit its shape.
    """
    for chunk in entry.chunks:
        for box, start in _flattened(entry, chunk) if entry.original_shape is not None else ((chunk.box, 0),):
            if not is_stacked:
                yield 0, StoredBox(box, box, chunk.segment, start)
                continue
            inner = Box(box.offset[1:], box.shape[1:])
            for number in range(box.shape[0]):
                first = start + number * inner.num_elements
                yield box.offset[0] + number, StoredBox(inner, inner, chunk.segment, first)


def _flattened(entry: StoredEntry, chunk: StoredChunk) -> Iterator[tuple[Box, int]]:
    """Yield (box, first value) of what a chunk holds of a tensor whose grid of equal cells was flattened cell by cell.

    Shapes: the stored tensor is ``[cells along dim 0, ..., cells along dim n, values of a cell]``.
    """
    assert entry.original_shape is not None
    grid, whole = entry.shape[:-1], entry.original_shape
    fits = len(grid) == len(whole) and all(cells and size % cells == 0 for size, cells in zip(whole, grid))
    cell = tuple(size // cells for size, cells in zip(whole, grid)) if fits else ()
    if not fits or math.prod(cell) != entry.shape[-1] or math.prod(chunk.box.shape[:-1]) != 1:
        raise CheckpointError(f"{chunk.segment.path}: a tensor of shape {whole} was flattened as {entry.shape}")
    corner = [index * size for index, size in zip(chunk.box.offset, cell)]
    start = 0
    for box in flat_range_boxes(cell, chunk.box.offset[-1], chunk.box.offset[-1] + chunk.box.shape[-1]):
        yield Box(tuple(a + b for a, b in zip(corner, box.offset, strict=True)), box.shape), start
        start += box.num_elements


class BoxReader:
    """Read boxes of native tensors from entries; the file of the last one stays open for the next."""

    def __init__(self) -> None:
        self._last: tuple[Segment, TorchFile] | None = None

    def read(self, name: str, box: Box, dtype: torch.dtype, stored: Sequence[StoredBox]) -> torch.Tensor:
        """Return a box, contiguous on the CPU, from the boxes that hold parts of it.

        Raises:
            DamagedCheckpointError: an entry is not what the metadata say, or nothing holds a part of the box.
        """
        parts = [(part, common) for part in stored if (common := part.box.intersect(box)) is not None]
        gaps = uncovered(box, (common for _, common in parts))
        if gaps:
            raise DamagedCheckpointError(f"no chunk holds {name}{describe_box(gaps[0])}")
        result = torch.empty(box.shape, dtype=dtype)
        for part, common in parts:
            file = self.open(part.segment)
            values = self._framed(part, file, dtype, name)
            result[common.relative_to(box.offset).slices] = values[common.relative_to(part.frame.offset).slices]
            file.release_pages()
        return result

    def open(self, segment: Segment) -> TorchFile:
        """Return the open file of an entry, good until the next is opened.

        Raises:
            DamagedCheckpointError: it is missing or damaged.
        """
        if self._last is None or self._last[0] != segment:
            self.close()
            self._last = (segment, segment.open())
        return self._last[1]

    def close(self) -> None:
        """Close the file that is open."""
        if self._last is not None:
            self._last[1].close()
            self._last = None

    @staticmethod
    def _framed(part: StoredBox, file: TorchFile, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return the values of a box's frame as they lie in the file."""
        tensor: Any = file.value
        for field in part.fields:
            tensor = tensor[field]
        end = part.start + part.frame.num_elements
        if not isinstance(tensor, LazyTensor) or tensor.dtype != dtype or tensor.num_elements < end:
            raise DamagedCheckpointError(f"{file.path}: the entry at byte {part.segment.start} does not hold {name}")
        return file.view(tensor).reshape(-1)[part.start : end].view(part.frame.shape)
