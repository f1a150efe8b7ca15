"""What a pickled checkpoint is read as: plain values, and records in the place of objects. Nothing of it can run."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class GlobalName:
    """Name a class or function that a pickle mentions; it is never imported."""

    module: str
    name: str

    def __str__(self) -> str:
        """Return the dotted name."""
        return f"{self.module}.{self.name}"


@dataclass(eq=False)
class Record:
    """Hold an object of a file as its class's name, what it was made from, and its attributes."""

    kind: GlobalName
    arguments: tuple[Any, ...] = ()
    attributes: dict[str, Any] = field(default_factory=dict)


@dataclass(eq=False)
class StoredArray:
    """Hold a NumPy array of a file as its dtype's text, its shape and its bytes."""

    dtype: str = ""
    shape: tuple[int, ...] = ()
    data: bytes = b""


@dataclass(frozen=True)
class StorageKey:
    """Name a block of numbers in a file; ``start`` is its first element for a view of a larger block."""

    key: str
    dtype: torch.dtype
    num_elements: int
    start: int = 0


@dataclass(frozen=True)
class LazyTensor:
    """Describe a tensor of a file without its values; offset and strides count elements of the storage."""

    storage: StorageKey
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the values."""
        return self.storage.dtype

    @property
    def num_elements(self) -> int:
        """Return the number of elements."""
        return math.prod(self.shape)

    def flat_part(self, start: int, shape: tuple[int, ...]) -> LazyTensor:
        """Return the contiguous tensor of ``shape`` that begins at element ``start`` of this one-dimensional one."""
        assert self.strides == (1,), "only a flat buffer is cut"
        return LazyTensor(self.storage, self.offset + start, shape, contiguous_strides(shape))

    def box(self, offset: tuple[int, ...], shape: tuple[int, ...]) -> LazyTensor:
        """Return a box of this tensor."""
        moved = sum(o * stride for o, stride in zip(offset, self.strides, strict=True))
        return LazyTensor(self.storage, self.offset + moved, shape, self.strides)

    def every_nth_row(self, start: int, step: int, count: int) -> LazyTensor:
        """Return ``count`` rows (elements of dim 0), one in every ``step``, from ``start`` on."""
        first, *others = self.strides
        return LazyTensor(self.storage, self.offset + start * first, (count, *self.shape[1:]), (first * step, *others))


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major tensor."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.insert(0, step)
        step *= size
    return tuple(strides)


def native_row_blocks(tensor: LazyTensor, head_dim: int, version: float) -> list[tuple[int, LazyTensor]]:
    """Return (first row in the native order, the rows' values) of everything in one rank's weight or bias.

    Shapes: ``tensor: [rows]`` or ``[rows, h]``.
    """
    rows = tensor.shape[0]
    if version >= 2.0:
        return [(0, tensor)]
    num_heads = rows // (3 * head_dim)
    blocks = []
    for head in range(num_heads):
        for part in range(3):
            if version >= 1.0:
                block = tensor.every_nth_row(head * 3 * head_dim + part, 3, head_dim)
            else:
                block = tensor.every_nth_row((part * num_heads + head) * head_dim, 1, head_dim)
            blocks.append(((head * 3 + part) * head_dim, block))
    return blocks
