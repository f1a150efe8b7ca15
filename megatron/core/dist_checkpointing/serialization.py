"""Write the tensors of all ranks into one folder, and fill the tensors of all ranks from one.

Both are collective: every rank calls them, and every rank learns when one of them fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.collectives import all_gather_objects, broadcast_object
from megatron.core.dist_checkpointing.index import CheckpointIndex, read_index, write_index
from megatron.core.dist_checkpointing.index_file import INDEX_FILE
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.dist_checkpointing.planner import MAX_PIECE_BYTES
from megatron.core.dist_checkpointing.rank_share import CheckpointWriteError, build_index, plan_share, write_error
from megatron.core.dist_checkpointing.read_plan import PieceRead, plan_reads
from megatron.core.dist_checkpointing.remote_pieces import read_remote_pieces
from megatron.core.dist_checkpointing.shard_reader import ShardReader, check_pieces
from megatron.core.dist_checkpointing.storage import check_file, sync_folder
from megatron.core.dist_checkpointing.validation import STRICT, DamagedCheckpointError, Strictness, find_misfits
from megatron.core.errors import CheckpointError, MegatronError
from megatron.core.process_group import Group


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
    share = plan_share(tensors, world, max_piece_bytes)
    written, error = None, None
    try:
        written = share.write(folder)
    except CheckpointWriteError as failure:
        error = failure
    raise_on_all_ranks(error, world)
    shares = all_gather_objects(written, world)
    if world.is_first:
        try:
            write_index(folder, build_index(share.plan, shares, common))
            sync_folder(folder)
        except OSError as failure:
            error = write_error(folder / INDEX_FILE, failure)
    raise_on_all_ranks(error, world)


def load_index(folder: Path, world: Group, verify: bool = True) -> CheckpointIndex:
    """Return the index, read and compared with the files beside it by the first rank, on every rank.

    Files that the first rank does not see are compared by those that do: each machine may hold its own.

    Raises:
        DamagedCheckpointError: the index or a shard file is missing or damaged; an index that was changed but still
            reads is returned, with ``is_intact`` False.
    """
    index: CheckpointIndex | None = None
    error: MegatronError | None = None
    if world.is_first:
        try:
            index = read_index(folder)
            _check_files(folder, index, [name for name in index.files if (folder / name).exists()], verify)
        except CheckpointError as failure:
            error = failure
    raise_on_all_ranks(error, world)
    found = broadcast_object(index, world)
    assert isinstance(found, CheckpointIndex)
    _check_files_elsewhere(folder, found, world, verify)
    return found


@dataclass(frozen=True)
class LoadedTensors:
    """Say how many bytes this rank read, which tensors of the run keep their values, and which were passed over."""

    bytes_read: int
    left_alone: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


def load_tensors(
    folder: Path,
    index: CheckpointIndex,
    tensors: Sequence[ShardedTensor],
    namespaces: Sequence[str],
    world: Group,
    verify: bool = True,
    allow_cast: bool = False,
    strictness: Strictness = STRICT,
) -> LoadedTensors:
    """Fill every rank's tensors in place; each rank reads the bytes that it needs, each once.

    A stored tensor whose name begins with one of ``namespaces`` and that no rank wants is refused, and so is one that
    is wanted and not stored, unless ``strictness`` says otherwise. With ``allow_cast`` values are converted to the
    dtype of the tensors that they fill.

    Raises:
        CheckpointError: names, shapes or dtypes do not fit; all of them are listed. On every rank alike.
        DamagedCheckpointError: a file is missing or changed. On every rank alike.
    """
    descriptions = all_gather_objects([tensor.describe() for tensor in tensors], world)
    misfits = find_misfits(descriptions, index.tensors, namespaces, allow_cast)
    if verify and not index.is_intact:
        raise DamagedCheckpointError(
            f"{folder / INDEX_FILE}: does not match its checksum; --no-verify-checkpoint takes it as it is"
            + "".join(f"\n  {line}" for line in misfits.problems())
        )
    problems = misfits.problems(strictness)
    if problems:
        raise CheckpointError(f"checkpoint {folder} does not fit this run:" + "".join(f"\n  {p}" for p in problems))
    present = [tensor for tensor in tensors if tensor.name in index.tensors]
    error: MegatronError | None = None
    with ShardReader(folder, verify) as reader:
        remote: list[PieceRead] = []
        targets = [tensor.data for tensor in present]
        try:
            wanted = [(tensor.name, tensor.pieces) for tensor in present]
            reads = plan_reads(wanted, index.tensors, descriptions, world.rank, verify)
            absent = {name for name in {read.piece.file for read in reads} if not (folder / name).exists()}
            remote = [read for read in reads if read.piece.file in absent]
            for read in reads:
                if read.piece.file not in absent:
                    reader.read(read, targets)
        except CheckpointError as failure:
            error = failure
        raise_on_all_ranks(error, world)
        error = read_remote_pieces(reader, folder, remote, targets, world)
    raise_on_all_ranks(error, world)
    check_pieces(folder, index.tensors, all_gather_objects(reader.cell_checksums, world))
    return LoadedTensors(reader.bytes_read, misfits.missing, misfits.unexpected)


def raise_on_all_ranks(error: MegatronError | None, world: Group) -> None:
    """Raise on every rank what the first rank that has an error reports; return where none has."""
    for reported in all_gather_objects(error, world):
        if reported is not None:
            raise reported


def _check_files(folder: Path, index: CheckpointIndex, names: Iterable[str], verify: bool) -> None:
    for name in names:
        check_file(folder / name, index.files[name], index.pieces_of(name), verify)


def _check_files_elsewhere(folder: Path, index: CheckpointIndex, world: Group, verify: bool) -> None:
    """Compare the files that the first rank does not see; collective."""
    absent = [name for name in index.files if not (folder / name).exists()] if world.is_first else []
    absent = broadcast_object(absent, world)
    if not absent:
        return
    here = [name for name in absent if (folder / name).exists()]
    seen = {name for names in all_gather_objects(here, world) for name in names}
    error = None
    try:
        # The first rank answers for those that nobody sees.
        _check_files(folder, index, here or [name for name in absent if world.is_first and name not in seen], verify)
    except CheckpointError as failure:
        error = failure
    raise_on_all_ranks(error, world)
