"""Sharded tensors of a run: with their values, and as descriptions that ranks exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.core.sharding import Box, ParamSpec, Piece, describe_box, full_pieces

_DTYPES: tuple[torch.dtype, ...] = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


@dataclass(frozen=True)
class TensorDescription:
    """Say which boxes of a global tensor one rank holds; it carries no values and travels between ranks.

    ``is_owner`` is False for a copy that another rank of the same model replica saves. ``is_expert`` says whose
    replicas hold equal boxes (see `ParamSpec`).
    """

    name: str
    global_shape: tuple[int, ...]
    dtype: str
    boxes: tuple[Box, ...]
    is_owner: bool = True
    is_expert: bool = False


@dataclass(frozen=True, eq=False)
class ShardedTensor:
    """Pair a local tensor with the boxes of the global tensor that it holds.

    ``name`` is the name in the checkpoint, the same at any layout. Local elements outside every piece are padding:
    they are neither saved nor loaded.
    """

    name: str
    global_shape: tuple[int, ...]
    pieces: tuple[Piece, ...]
    data: torch.Tensor
    is_owner: bool = True
    is_expert: bool = False

    def describe(self) -> TensorDescription:
        """Return the description without the values."""
        return TensorDescription(
            name=self.name,
            global_shape=self.global_shape,
            dtype=dtype_name(self.data.dtype),
            boxes=tuple(piece.global_box for piece in self.pieces),
            is_owner=self.is_owner,
            is_expert=self.is_expert,
        )

    def view(self, box: Box) -> torch.Tensor | None:
        """Return the local values of a global box that lies within one piece, or None where none holds it."""
        for piece in self.pieces:
            if piece.global_box.intersect(box) == box:
                return self.data[piece.localized(box).slices]
        return None


def from_spec(spec: ParamSpec, data: torch.Tensor) -> ShardedTensor:
    """Describe a tensor that is laid out, and named, as ``spec`` says."""
    for piece in spec.pieces:
        ends = (o + n for o, n in zip(piece.local_offset, piece.global_box.shape, strict=True))
        assert all(end <= size for end, size in zip(ends, data.shape, strict=True)), (
            f"{spec.name}: a piece at {piece.local_offset} of shape {piece.global_box.shape} is outside the "
            f"local tensor of shape {tuple(data.shape)}"
        )
    return ShardedTensor(spec.name, spec.global_shape, spec.pieces, data.detach(), spec.is_owner, spec.is_expert)


def whole_tensor(name: str, data: torch.Tensor) -> ShardedTensor:
    """Describe a tensor that this rank holds whole."""
    return ShardedTensor(name, tuple(data.shape), full_pieces(data.shape), data.detach())


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name as the index stores it, such as ``bfloat16``."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """Return the dtype of a stored name.

    Raises:
        KeyError: no tensor of a checkpoint can have this dtype.
    """
    return {dtype_name(dtype): dtype for dtype in _DTYPES}[name]


def piece_key(name: str, global_shape: Sequence[int], box: Box) -> str:
    """Return the key of a piece in its file: the name, and the slice in brackets unless it is the whole tensor."""
    if box.shape == tuple(global_shape):
        return name
    return name + describe_box(box)
