"""Read a native checkpoint by name and box, checksums compared."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.checksum import checksum
from megatron.core.dist_checkpointing.disk import read_error
from megatron.core.dist_checkpointing.index import INDEX_FILE, StoredPiece, StoredTensor, check_run_state, read_index
from megatron.core.dist_checkpointing.mapping import dtype_of
from megatron.core.dist_checkpointing.shard_file import check_file
from megatron.core.dist_checkpointing.state_dict import FLOAT8_PREFIX, RNG_PREFIX
from megatron.core.dist_checkpointing.validation import check_geometry
from megatron.core.errors import DamagedCheckpointError
from megatron.core.object_store import as_path
from megatron.core.ranged_file import RangedFile, open_ranged
from megatron.core.sharding import Box, describe_box, uncovered
from megatron.interop.checkpoint_source import TensorInfo


class NativeSource:
    """Offer the tensors of an iteration's folder; a `CheckpointSource`.

    A stored piece (at most 64 MiB, or a row) is read whole and compared with its checksum even where only a part of it
    is wanted; the last one is kept for the next read. Without ``verify`` nothing is compared. Streams of random numbers
    belong to the layout that ``common`` names; ``with_random_streams`` they are among the tensors, for a copy that
    keeps it, and so are the scales of fp8, which belong to a run.

    Raises:
        DamagedCheckpointError: the index or a shard file is missing, cut short or changed.
    """

    def __init__(self, folder: str | Path, verify: bool = True, with_random_streams: bool = False) -> None:
        self.folder = as_path(folder)
        index = read_index(self.folder)
        check_run_state(self.folder, index.common)
        check_geometry(self.folder, index)
        for name, file in index.files.items():
            check_file(self.folder / name, file, index.pieces_of(name), verify)
        if verify and not index.is_intact:
            raise DamagedCheckpointError(f"{self.folder / INDEX_FILE}: does not match its checksum")
        self.common: Mapping[str, Any] = index.common
        self.stored: Mapping[str, StoredTensor] = {
            name: tensor
            for name, tensor in index.tensors.items()
            if with_random_streams or not name.startswith((RNG_PREFIX, FLOAT8_PREFIX))
        }
        self.tensors = {
            name: TensorInfo(tensor.global_shape, dtype_of(tensor.dtype)) for name, tensor in self.stored.items()
        }
        self.bytes_read = 0
        self._verify = verify
        self._files: dict[str, RangedFile] = {}
        self._piece: StoredPiece | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it.

        Raises:
            KeyError: there is no tensor of this name.
            DamagedCheckpointError: a file is missing, cut short or changed, or no piece holds a part of the box.
        """
        info = self.tensors[name]
        box = info.whole if box is None else box
        parts = [(piece, common) for piece in self.stored[name].pieces if (common := box.intersect(piece.box))]
        gaps = uncovered(box, (common for _, common in parts))
        if gaps:
            raise DamagedCheckpointError(f"{self.folder}: no piece holds {name}{describe_box(gaps[0])}")
        values = torch.empty(box.shape, dtype=info.dtype)
        for piece, common in parts:
            stored = self._bytes_of(piece).view(info.dtype).view(piece.box.shape)
            place = common.relative_to(piece.box.offset)
            values[common.relative_to(box.offset).slices] = stored[place.slices]
        return values

    def close(self) -> None:
        """Close the shard files."""
        for file in self._files.values():
            file.close()
        self._piece, self._buffer = None, torch.empty(0, dtype=torch.uint8)

    def _bytes_of(self, piece: StoredPiece) -> torch.Tensor:
        if piece is self._piece:
            return self._buffer[: piece.num_bytes]
        if self._buffer.numel() < piece.num_bytes:
            self._buffer = torch.empty(piece.num_bytes, dtype=torch.uint8)
        self._piece = None  # what the buffer holds is not whole until the end
        data = self._buffer.numpy().data[: piece.num_bytes]
        path = self.folder / piece.file
        try:
            received = self._fill(data, piece)
        except OSError as error:
            raise read_error(f"{path}: cannot read {piece.key}", error) from error
        if received != piece.num_bytes:
            raise DamagedCheckpointError(f"{path}: ends within {piece.key}")
        if self._verify and checksum(data) != piece.checksum:
            raise DamagedCheckpointError(f"{path}: the bytes of {piece.key} do not match their checksum")
        self.bytes_read += received
        self._piece = piece
        return self._buffer[: piece.num_bytes]

    def _fill(self, data: memoryview, piece: StoredPiece) -> int:
        """Fill ``data`` with the piece's bytes; return how many the file had."""
        if piece.file not in self._files:
            self._files[piece.file] = open_ranged(self.folder / piece.file)  # closed by close()
        return self._files[piece.file].fill(data, piece.start)
