"""Write the tensors of all ranks into one folder, and fill the tensors of all ranks from one.

Both are collective: every rank calls them, and every rank learns when one of them fails.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.collectives import all_gather_objects, broadcast_object
from megatron.core.dist_checkpointing.index import CheckpointIndex, read_index, write_index
from megatron.core.dist_checkpointing.mapping import (
    ShardedTensor,
    StoredFile,
    StoredPiece,
    StoredTensor,
    dtype_of,
    piece_key,
)
from megatron.core.dist_checkpointing.planner import (
    MAX_PIECE_BYTES,
    PlannedTensor,
    plan_reads,
    plan_writes,
)
from megatron.core.dist_checkpointing.storage import (
    ShardEntry,
    ShardReader,
    check_file,
    shard_bytes,
    sync_folder,
    write_shard,
)
from megatron.core.dist_checkpointing.validation import DamagedCheckpointError, find_misfits
from megatron.core.errors import CheckpointError, MegatronError
from megatron.core.process_group import Group
from megatron.core.sharding import Box


def save_tensors(
    folder: Path,
    tensors: Sequence[ShardedTensor],
    common: Mapping[str, Any],
    world: Group,
    max_piece_bytes: int = MAX_PIECE_BYTES,
) -> None:
    """Write every rank's share of the tensors into an existing folder, then the index, and force all to disk.

    Raises:
        CheckpointError: any rank could not write (raised on every rank), or the tensors leave a gap.
    """
    plan = plan_writes(all_gather_objects([tensor.describe() for tensor in tensors], world), max_piece_bytes)
    places, entries = _entries_of_rank(plan, tensors, world.ranks[world.rank], world)
    file_name = f"shard_{world.ranks[world.rank]:05d}.safetensors"
    file: StoredFile | None = None
    pieces: list[tuple[str, StoredPiece]] = []
    error = None
    if entries:
        try:
            file, written = write_shard(folder / file_name, entries)
            pieces = [
                (name, StoredPiece(box, file_name, entry.key, place.start, place.num_bytes, place.checksum))
                for (name, box), entry, place in zip(places, entries, written, strict=True)
            ]
        except OSError as failure:
            error = _write_error(folder / file_name, shard_bytes(entries), failure)
    raise_on_all_ranks(error, world)
    gathered = all_gather_objects((file_name, file, pieces), world)
    error = None
    if world.is_first:
        index = _build_index(plan, gathered, common)
        try:
            write_index(folder, index)
            sync_folder(folder)
        except OSError as failure:
            error = _write_error(folder / "index.json", 0, failure)
    raise_on_all_ranks(error, world)


def load_index(folder: Path, world: Group, verify: bool = True) -> CheckpointIndex:
    """Return the index, read and compared with the files beside it by the first rank, on every rank.

    Raises:
        DamagedCheckpointError: the index or a shard file is missing or damaged; an index that was changed but still
            reads is returned, with ``is_intact`` False.
    """
    index: CheckpointIndex | None = None
    error: MegatronError | None = None
    if world.is_first:
        try:
            index = read_index(folder)
            for name, file in index.files.items():
                check_file(folder / name, file, index.pieces_of(name), verify)
        except CheckpointError as failure:
            error = failure
    raise_on_all_ranks(error, world)
    found = broadcast_object(index, world)
    assert isinstance(found, CheckpointIndex)
    return found


def load_tensors(
    folder: Path,
    index: CheckpointIndex,
    tensors: Sequence[ShardedTensor],
    namespaces: Sequence[str],
    world: Group,
    verify: bool = True,
    allow_cast: bool = False,
) -> int:
    """Fill every rank's tensors in place and return how many bytes this rank read.

    A stored tensor whose name begins with one of ``namespaces`` and that no rank wants is refused. With ``allow_cast``
    values are converted to the dtype of the tensors that they fill.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit; all of them are listed. On every rank alike.
        DamagedCheckpointError: a file is missing or changed. On every rank alike.
    """
    descriptions = all_gather_objects([tensor.describe() for tensor in tensors], world)
    misfits = find_misfits(descriptions, index.tensors, namespaces, allow_cast)
    problems = "".join(f"\n  {line}" for line in misfits)
    if verify and not index.is_intact:
        raise DamagedCheckpointError(f"{folder / 'index.json'}: does not match its checksum{problems}")
    if misfits:
        raise CheckpointError(f"checkpoint {folder} does not fit this run:{problems}")
    error: MegatronError | None = None
    bytes_read = 0
    try:
        reads = plan_reads([(tensor.name, tensor.pieces) for tensor in tensors], index.tensors)
        targets = [tensor.data for tensor in tensors]
        with ShardReader(folder, verify) as reader:
            for read in reads:
                reader.read(read, targets)
            bytes_read = reader.bytes_read
    except CheckpointError as failure:
        error = failure
    raise_on_all_ranks(error, world)
    return bytes_read


def raise_on_all_ranks(error: MegatronError | None, world: Group) -> None:
    """Raise on every rank what the first rank that has an error reports; return where none has."""
    for reported in all_gather_objects(error, world):
        if reported is not None:
            raise reported


def _entries_of_rank(
    plan: Sequence[PlannedTensor], tensors: Sequence[ShardedTensor], rank: int, world: Group
) -> tuple[list[tuple[str, Box]], list[ShardEntry]]:
    """Return what this rank writes: (name, box) and the entry of each, wide types first."""
    by_name: dict[str, list[ShardedTensor]] = {}
    for tensor in tensors:
        if tensor.is_owner:
            by_name.setdefault(tensor.name, []).append(tensor)
    own = [(tensor, box) for tensor in plan for box, writer in tensor.writes if world.ranks[writer] == rank]
    own.sort(key=lambda item: -dtype_of(item[0].dtype).itemsize)
    entries = []
    for planned, box in own:
        views = [tensor.view(box) for tensor in by_name[planned.name]]
        values = next(view for view in views if view is not None)
        entries.append(ShardEntry(piece_key(planned.name, planned.global_shape, box), values))
    return [(planned.name, box) for planned, box in own], entries


def _build_index(
    plan: Sequence[PlannedTensor],
    gathered: Sequence[tuple[str, StoredFile | None, list[tuple[str, StoredPiece]]]],
    common: Mapping[str, Any],
) -> CheckpointIndex:
    pieces: dict[str, list[StoredPiece]] = {tensor.name: [] for tensor in plan}
    for _, _, written in gathered:
        for name, piece in written:
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
    files = {name: file for name, file, _ in gathered if file is not None}
    return CheckpointIndex(tensors, files, common)


def _write_error(path: Path, num_bytes: int, failure: OSError) -> CheckpointError:
    need = f"; {num_bytes} bytes are needed for it" if num_bytes else ""
    try:
        free = f", {shutil.disk_usage(path.parent).free} are free"
    except OSError:
        free = ""
    return CheckpointError(f"cannot write {path}: {failure.strerror}{need}{free}")
