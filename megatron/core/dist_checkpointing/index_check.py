"""Hold the boxes of an index against each other and against the files, before anything is made that large."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

from megatron.core.dist_checkpointing.index import INDEX_FILE, CheckpointIndex, StoredPiece, StoredTensor
from megatron.core.dist_checkpointing.mapping import dtype_of
from megatron.core.errors import DamagedCheckpointError


def check_geometry(folder: Path, index: CheckpointIndex) -> None:
    """Refuse boxes that are outside of their tensor, overlap, have other sizes than their bytes, or are in no file.

    So nothing that is read is larger than the files. A gap between boxes is found where somebody reads it.

    Raises:
        DamagedCheckpointError: there is such a box; it is named.
    """
    try:
        _check(index)
    except ValueError as error:
        raise DamagedCheckpointError(f"{folder / INDEX_FILE}: not an index of a checkpoint ({error})") from error


def _check(index: CheckpointIndex) -> None:
    sizes = {name: file.num_bytes for name, file in index.files.items()}
    total = 0
    for tensor in index.tensors.values():
        item_bytes = _item_bytes(tensor)
        held = 0
        for piece in tensor.pieces:
            _check_piece(tensor, piece, item_bytes, sizes)
            held += piece.box.num_elements
            total += piece.num_bytes
        if held > math.prod(tensor.global_shape):
            raise ValueError(f"pieces of {tensor.name} overlap: {held} elements for a shape of {tensor.global_shape}")
    if total > sum(sizes.values()):
        raise ValueError(f"pieces of {total} bytes in files of {sum(sizes.values())} bytes")


def _item_bytes(tensor: StoredTensor) -> int:
    try:
        return dtype_of(tensor.dtype).itemsize
    except KeyError as error:
        raise ValueError(f"{tensor.name} has the dtype {tensor.dtype:.40}") from error


def _check_piece(tensor: StoredTensor, piece: StoredPiece, item_bytes: int, sizes: Mapping[str, int]) -> None:
    shape, box = tensor.global_shape, piece.box
    if not len(box.offset) == len(box.shape) == len(shape):
        raise ValueError(f"a piece of {tensor.name} has {len(box.shape)} dims, and the tensor {len(shape)}")
    for start, length, size in zip(box.offset, box.shape, shape):
        if start + length > size:
            raise ValueError(f"a piece of {tensor.name} at {box.offset} of shape {box.shape} is outside of {shape}")
    if box.num_elements * item_bytes != piece.num_bytes:
        raise ValueError(f"a piece of {tensor.name} of shape {box.shape} in {piece.num_bytes} bytes")
    if piece.file not in sizes or piece.start + piece.num_bytes > sizes[piece.file]:
        raise ValueError(f"a piece of {tensor.name} is at byte {piece.start} of {piece.file:.80}, beyond its end")
