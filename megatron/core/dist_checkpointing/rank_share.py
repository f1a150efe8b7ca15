"""What one rank writes of a checkpoint: planned by all ranks together, written by each on its own."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megatron.core.collectives import all_gather_objects
from megatron.core.dist_checkpointing.index import CheckpointIndex
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    StoredFile,
    StoredPiece,
    StoredTensor,
    dtype_of,
    piece_key,
)
from megatron.core.dist_checkpointing.planner import MAX_PIECE_BYTES, PlannedTensor, plan_writes
from megatron.core.dist_checkpointing.staging import StagingArea
from megatron.core.dist_checkpointing.storage import ShardEntry, shard_bytes, write_shard
from megatron.core.errors import CheckpointError
from megatron.core.process_group import Group
from megatron.core.sharding import Box


class CheckpointWriteError(CheckpointError):
    """Report a checkpoint that the file system did not take; what was saved before is still in place."""


@dataclass(frozen=True, eq=False)
class RankShare:
    """Hold what this rank writes, and the plan of all ranks that it comes from.

    ``places`` gives the tensor and the box of each entry; entries of wide types come first.
    """

    plan: tuple[PlannedTensor, ...]
    file_name: str
    places: tuple[tuple[str, Box], ...]
    entries: tuple[ShardEntry, ...]

    def staged(self, area: StagingArea) -> RankShare:
        """Return the same share with a copy of its values, which training no longer changes."""
        return replace(self, entries=tuple(area.copy(self.entries)))

    def write(self, folder: Path) -> WrittenShare:
        """Write the share into an existing folder and force it to disk; a rank without a share writes no file.

        Raises:
            CheckpointWriteError: the file system refused; the half-written file is gone.
        """
        if not self.entries:
            return WrittenShare(self.file_name, None, ())
        path = folder / self.file_name
        try:
            file, written = write_shard(path, self.entries)
        except OSError as failure:
            path.unlink(missing_ok=True)
            raise write_error(path, failure, shard_bytes(self.entries)) from failure
        pieces = tuple(
            (name, StoredPiece(box, self.file_name, entry.key, place.start, place.num_bytes, place.checksum))
            for (name, box), entry, place in zip(self.places, self.entries, written, strict=True)
        )
        return WrittenShare(self.file_name, file, pieces)


@dataclass(frozen=True)
class WrittenShare:
    """Say what a rank has written, and where: tensor and place of each piece; ``file`` is None where it is nothing."""

    file_name: str
    file: StoredFile | None
    pieces: tuple[tuple[str, StoredPiece], ...]


def plan_share(tensors: Sequence[ShardedTensor], world: Group, max_piece_bytes: int = MAX_PIECE_BYTES) -> RankShare:
    """Agree with all ranks on who writes what, and return this rank's share; collective.

    Raises:
        CheckpointError: the tensors leave a gap, or ranks disagree on one. On every rank alike.
    """
    plan = plan_writes(all_gather_objects([tensor.describe() for tensor in tensors], world), max_piece_bytes)
    by_name: dict[str, list[ShardedTensor]] = {}
    for tensor in tensors:
        if tensor.is_owner:
            by_name.setdefault(tensor.name, []).append(tensor)
    own = [(planned, box) for planned in plan for box, writer in planned.writes if writer == world.rank]
    own.sort(key=lambda item: -dtype_of(item[0].dtype).itemsize)
    entries = []
    for planned, box in own:
        views = [tensor.view(box) for tensor in by_name[planned.name]]
        values = next(view for view in views if view is not None)
        entries.append(ShardEntry(piece_key(planned.name, planned.global_shape, box), values))
    places = tuple((planned.name, box) for planned, box in own)
    return RankShare(plan, f"shard_{world.ranks[world.rank]:05d}.safetensors", places, tuple(entries))


def build_index(
    plan: Sequence[PlannedTensor], shares: Sequence[WrittenShare], common: Mapping[str, Any]
) -> CheckpointIndex:
    """Return the index of a checkpoint that all ranks have written."""
    pieces: dict[str, list[StoredPiece]] = {tensor.name: [] for tensor in plan}
    for share in shares:
        for name, piece in share.pieces:
            pieces[name].append(piece)
    tensors = {
        tensor.name: StoredTensor(
            tensor.name,
            tensor.global_shape,
            tensor.dtype,
            tuple(sorted(pieces[tensor.name], key=lambda piece: piece.box.offset)),
        )
        for tensor in plan
    }
    files = {share.file_name: share.file for share in shares if share.file is not None}
    return CheckpointIndex(tensors, files, common)


def write_error(path: Path, failure: OSError, needed_bytes: int = 0) -> CheckpointWriteError:
    """Return the error that says what could not be written, how many bytes it needs and how many there are."""
    need = f"; {needed_bytes} bytes are needed for it" if needed_bytes else ""
    try:
        free = f", {shutil.disk_usage(path.parent).free} are free"
    except OSError:
        free = ""
    reason = failure.strerror or os.strerror(failure.errno or 0)
    return CheckpointWriteError(f"cannot write {path}: {reason}{need}{free}")
