"""Write a shard file whose values come one tensor at a time: the header first, from shapes alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from megatron.core.dist_checkpointing.checksum import checksum
from megatron.core.dist_checkpointing.disk import SequentialFile
from megatron.core.dist_checkpointing.index import StoredFile, StoredPiece
from megatron.core.dist_checkpointing.mapping import dtype_name, piece_key
from megatron.core.dist_checkpointing.planner import MAX_PIECE_BYTES
from megatron.core.dist_checkpointing.shard_file import ShardEntry, shard_header
from megatron.core.sharding import Box, split_box
from megatron.interop.checkpoint_source import CheckpointSource, TensorInfo


@dataclass(frozen=True)
class PlannedPiece:
    """Name a box of a tensor that is to become one entry of a shard file."""

    name: str
    info: TensorInfo
    box: Box

    @property
    def key(self) -> str:
        """Return the entry's name in the file."""
        return piece_key(self.name, self.info.global_shape, self.box)

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the entry's values."""
        return self.box.num_elements * self.info.dtype.itemsize

    def describe(self) -> ShardEntry:
        """Return the entry without values: a header needs the shape and the dtype only."""
        return ShardEntry(self.key, torch.empty(self.box.shape, dtype=self.info.dtype, device="meta"))


def plan_files(
    tensors: Sequence[tuple[str, TensorInfo]], max_file_bytes: int, max_piece_bytes: int = MAX_PIECE_BYTES
) -> list[list[PlannedPiece]]:
    """Group tensors into files of about ``max_file_bytes``, wide types first; a tensor is never in two files."""
    ordered = sorted(tensors, key=lambda item: (-item[1].dtype.itemsize, item[0]))
    files: list[list[PlannedPiece]] = []
    room = 0
    for name, info in ordered:
        if not info.num_elements:
            continue
        if not files or info.num_bytes > room:
            files.append([])
            room = max_file_bytes
        room -= info.num_bytes
        boxes = split_box(info.whole, info.dtype.itemsize, max_piece_bytes)
        files[-1] += [PlannedPiece(name, info, box) for box in boxes]
    return files


def write_streamed_shard(
    path: Path, pieces: Sequence[PlannedPiece], source: CheckpointSource
) -> tuple[StoredFile, list[tuple[str, StoredPiece]]]:
    """Write one file and force it to disk; one tensor of the source is held at a time.

    Raises:
        OSError: the file cannot be written.
    """
    header = shard_header([piece.describe() for piece in pieces])
    written = []
    with SequentialFile(path, sum(piece.num_bytes for piece in pieces)) as file:
        file.append(header)
        for piece, values in _values_of(pieces, source):
            start = file.num_bytes
            crc = file.append(values.reshape(-1).view(torch.uint8).numpy())
            stored = StoredPiece(piece.box, path.name, piece.key, start, file.num_bytes - start, f"{crc:08x}")
            written.append((piece.name, stored))
    return StoredFile(file.num_bytes, len(header), checksum(header)), written


def _values_of(pieces: Sequence[PlannedPiece], source: CheckpointSource) -> Iterator[tuple[PlannedPiece, torch.Tensor]]:
    """Yield each piece's values: views of a tensor that is read once, and let go before the next one is."""
    name, whole = "", torch.empty(0)
    for piece in pieces:
        if piece.name != name:
            whole = torch.empty(0)
            name, whole = piece.name, source.read(piece.name)
            assert (tuple(whole.shape), whole.dtype) == (piece.info.global_shape, piece.info.dtype), (
                f"{name}: the source gave {dtype_name(whole.dtype)} {list(whole.shape)}"
            )
        # Pieces are cut along the first dimension, so that each is contiguous.
        yield piece, whole[piece.box.slices]
