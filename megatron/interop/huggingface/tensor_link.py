"""Which box of one of our tensors holds the values of which box of a Hugging Face tensor.

One list of links serves both directions, and every box of either side that anybody wants.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.core.sharding import Box, full_pieces

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class TensorLink:
    """Link a box of our tensor ``native`` to the box of their tensor ``foreign`` that holds the same values.

    With ``is_transposed`` one box is the other with its last two dims exchanged. Where theirs has fewer dims, the first
    ones of ours are 1: it is one of the tensors that ours stacks. ``is_copy`` marks values that another of their
    tensors has too: they are written, and need not be there. With ``foreign_step`` every so manieth place of their
    last dim counts, from the box's first to its last.
    """

    native: str
    native_box: Box
    foreign: str
    foreign_box: Box
    is_transposed: bool = False
    is_copy: bool = False
    foreign_step: int = 1

    def foreign_part(self, native_part: Box) -> Box:
        """Return the box of their tensor that holds a part of this link's box of ours, and what lies between."""
        relative, dims = native_part.relative_to(self.native_box.offset), len(self.foreign_box.shape)
        stacked = len(relative.shape) - dims
        offset, shape = relative.offset[stacked:], relative.shape[stacked:]
        if self.is_transposed:
            offset, shape = _exchanged(offset), _exchanged(shape)
        if self.foreign_step > 1:
            offset = (*offset[:-1], offset[-1] * self.foreign_step)
            shape = (*shape[:-1], (shape[-1] - 1) * self.foreign_step + 1)
        return Box(tuple(o + base for o, base in zip(offset, self.foreign_box.offset, strict=True)), shape)

    def foreign_slices(self, native_part: Box) -> tuple[slice, ...]:
        """Return where in their tensor the values of a part of this link's box of ours are."""
        slices = self.foreign_part(native_part).slices
        if self.foreign_step == 1:
            return slices
        return (*slices[:-1], slice(slices[-1].start, slices[-1].stop, self.foreign_step))

    def to_native(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of theirs with our dims; those that we stack are broadcast over dims of 1."""
        if self.foreign_step > 1:
            values = values[..., :: self.foreign_step]
        return values.mT if self.is_transposed else values

    def to_foreign(self, values: torch.Tensor) -> torch.Tensor:
        """Return values of ours with their dims."""
        values = values.reshape(values.shape[values.dim() - len(self.foreign_box.shape) :])
        return values.mT if self.is_transposed else values


def _exchanged(dims: tuple[int, ...]) -> tuple[int, ...]:
    return (*dims[:-2], dims[-1], dims[-2])


def whole(native: str, foreign: str, shape: Sequence[int], *, is_transposed: bool = False) -> TensorLink:
    """Link two whole tensors; ``shape`` is ours."""
    box = full_pieces(shape)[0].global_box
    foreign_box = full_pieces(tuple(reversed(box.shape)))[0].global_box if is_transposed else box
    return TensorLink(native, box, foreign, foreign_box, is_transposed)


def rows(
    native: str,
    native_start: int,
    foreign: str,
    foreign_start: int,
    num_rows: int,
    trailing: tuple[int, ...],
    *,
    is_transposed: bool = False,
) -> TensorLink:
    """Link ``num_rows`` rows of our tensor to as many rows, or transposed columns, of theirs.

    ``trailing`` is the rest of our tensor's shape: one dim for a weight, none for a bias.
    """
    zeros = tuple(0 for _ in trailing)
    native_box = Box((native_start, *zeros), (num_rows, *trailing))
    foreign_box = Box((foreign_start, *zeros), (num_rows, *trailing))
    if is_transposed and trailing:
        foreign_box = Box(foreign_box.offset[::-1], foreign_box.shape[::-1])
    return TensorLink(native, native_box, foreign, foreign_box, is_transposed and bool(trailing))


def one_of(native: str, number: int, first_row: int, foreign: str, shape: tuple[int, ...]) -> TensorLink:
    """Link a whole tensor of theirs, of this shape, to the tensor of that number in the stack that ours is.

    There it begins at ``first_row``.
    """
    zeros = tuple(0 for _ in shape)
    native_box = Box((number, first_row, *zeros[1:]), (1, *shape))
    return TensorLink(native, native_box, foreign, Box(zeros, shape))


def query_key_value_rows(num_heads: int, num_groups: int, head_dim: int) -> Iterator[tuple[str, int, int, int]]:
    """Yield (``q``, ``k`` or ``v``; first row in our fused tensor; first row among all of that kind; number of rows).

    Our rows are ``[q ... q, k, v]`` for every key-value group; theirs are all queries, all keys, all values.
    """
    query_rows = num_heads // num_groups * head_dim
    for group in range(num_groups):
        start = group * (query_rows + 2 * head_dim)
        yield "q", start, group * query_rows, query_rows
        yield "k", start + query_rows, group * head_dim, head_dim
        yield "v", start + query_rows + head_dim, group * head_dim, head_dim


def shapes_of(boxes: Iterable[tuple[str, Box]]) -> dict[str, tuple[int, ...]]:
    """Return each tensor's shape: the corner of the furthest of its boxes. Names keep the order of the boxes."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, box in boxes:
        corner = tuple(o + n for o, n in zip(box.offset, box.shape, strict=True))
        known = shapes.get(name, corner)
        shapes[name] = tuple(max(pair) for pair in zip(known, corner, strict=True))
    return shapes
