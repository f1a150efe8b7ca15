"""Load the tensors of all ranks from one checkpoint folder.

All functions are collective: every rank must call them, and an error on one rank is raised on all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

from megatron.core.collectives import all_gather_objects, broadcast_object, raise_on_all_ranks, run_on_all_ranks
from megatron.core.dist_checkpointing.index import INDEX_FILE, CheckpointIndex, read_index
from megatron.core.dist_checkpointing.planner import ShardedTensor, ShardRead, plan_reads
from megatron.core.dist_checkpointing.shard_file import check_file
from megatron.core.dist_checkpointing.shard_reader import ShardReader, check_shards, read_remote_shards
from megatron.core.dist_checkpointing.validation import STRICT, Strictness, check_geometry, find_misfits
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.parallel_state import ParallelState, all_gather_from_world, gather_from_world
from megatron.core.process_group import Group


def load_index(folder: Path, world: Group, verify: bool = True, needs_streams: bool = True) -> CheckpointIndex:
    """Return the index on every rank, after the first rank has read it and checked the shard files.

    Files that the first rank cannot see are checked by ranks that can: each node may have its own files. Without
    ``needs_streams``, files that hold only random number streams may be lost; the index names them.

    Raises:
        DamagedCheckpointError: the index or a shard file is missing or damaged. An index that was modified but is still
            readable is returned with ``is_intact`` False.
    """

    def read() -> CheckpointIndex | None:
        if not world.is_first:
            return None
        index = read_index(folder)
        check_geometry(folder, index)
        lost = []
        for name in index.files:
            if not (folder / name).exists():
                continue
            try:
                check_file(folder / name, index.files[name], index.shards_of(name), verify)
            except DamagedCheckpointError:
                if needs_streams or not index.has_only_streams(name):
                    raise
                lost.append(name)
        return replace(index, lost_streams=tuple(lost))

    found = broadcast_object(run_on_all_ranks(read, world), world)
    assert isinstance(found, CheckpointIndex)
    absent = _check_files_elsewhere(folder, found, world, verify, needs_streams)
    return replace(found, lost_streams=(*found.lost_streams, *absent))


Progress = Callable[[int, int], None]
"""Callback that receives this rank's bytes read so far and in total."""


def ignore_progress(done: int, total: int) -> None:
    """Report no progress."""


@dataclass(frozen=True)
class LoadedTensors:
    """Result of a load: bytes read, tensors of the run that keep their values, and stored tensors that were skipped."""

    bytes_read: int
    left_alone: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()


def load_tensors(
    folder: Path,
    index: CheckpointIndex,
    tensors: Sequence[ShardedTensor],
    namespaces: Sequence[str],
    state: ParallelState,
    verify: bool = True,
    allow_cast: bool = False,
    strictness: Strictness = STRICT,
    progress: Progress = ignore_progress,
) -> LoadedTensors:
    """Fill every rank's tensors in place; each rank reads the bytes that it needs, each of them once.

    Stored tensors that no rank requests and whose names start with one of ``namespaces`` are an error, and so are
    requested tensors that are not stored, unless ``strictness`` allows them. With ``allow_cast`` values are converted
    to the dtype of the tensors that they fill.

    Raises:
        CheckpointError: names, shapes or dtypes do not match; the message names the first of each. All ranks raise.
        DamagedCheckpointError: a file is missing or modified. All ranks raise.
    """
    world = state.world
    descriptions = all_gather_from_world([tensor.describe() for tensor in tensors], state)
    misfits = find_misfits(descriptions, index.tensors, namespaces, allow_cast)
    if verify and not index.is_intact:
        raise DamagedCheckpointError(
            f"{folder / INDEX_FILE}: does not match its checksum; --no-verify-checkpoint loads it anyway"
            + "".join(f"; {problem}" for problem in misfits.problems())
        )
    problems = misfits.problems(strictness)
    if problems:
        raise CheckpointError(f"checkpoint {folder} does not match this run: {'; '.join(problems)}")
    present = [tensor for tensor in tensors if tensor.name in index.tensors]
    lazy = {tensor.name: number for number, tensor in enumerate(present) if tensor.quantized is not None}
    with ShardReader(folder, verify) as reader, ExitStack() as waiting:
        targets = [tensor.data for tensor in present]

        def read_here() -> list[ShardRead]:
            wanted = [(tensor.name, tensor.shards) for tensor in present]
            reads = plan_reads(wanted, index.tensors, descriptions, world.rank, verify)
            absent = {name for name in {read.shard.file for read in reads} if not (folder / name).exists()}
            total = sum(read.num_bytes for read in reads if read.shard.file not in absent)
            # Tensors that are quantized are loaded one after the other, so that only one is in memory.
            ordered = sorted(reads, key=lambda read: lazy.get(read.tensor.name, -1))
            for number, several in groupby(ordered, key=lambda read: lazy.get(read.tensor.name, -1)):
                with ExitStack() as opened:
                    if number >= 0:
                        opened.enter_context(present[number].opened())
                    of_tensor = list(several)
                    for read in of_tensor:
                        if read.shard.file not in absent:
                            reader.read(read, targets)
                            progress(reader.bytes_read, total)
                    if any(read.shard.file in absent for read in of_tensor):
                        waiting.push(opened.pop_all())
            return [read for read in reads if read.shard.file in absent]

        remote = run_on_all_ranks(read_here, world)
        error = read_remote_shards(reader, folder, remote, targets, world)
    raise_on_all_ranks(error, world)
    found = gather_from_world(reader.cell_checksums, state)
    run_on_all_ranks(lambda: check_shards(folder, index.tensors, found), world)
    return LoadedTensors(reader.bytes_read, misfits.missing, misfits.unexpected)


def _check_files(folder: Path, index: CheckpointIndex, names: Iterable[str], verify: bool) -> None:
    for name in names:
        check_file(folder / name, index.files[name], index.shards_of(name), verify)


def _check_files_elsewhere(
    folder: Path, index: CheckpointIndex, world: Group, verify: bool, needs_streams: bool
) -> list[str]:
    """Check the files that the first rank cannot see, and return the lost ones that are not needed; collective."""

    def there(names: Iterable[str]) -> list[str]:
        return run_on_all_ranks(lambda: [name for name in names if (folder / name).exists()], world)

    seen_first = broadcast_object(there(index.files if world.is_first else ()), world)
    absent = [name for name in index.files if name not in seen_first]
    if not absent:
        return []
    here = there(absent)
    seen = {name for names in all_gather_objects(here, world) for name in names}
    unseen = [name for name in absent if name not in seen]
    lost = [] if needs_streams else [name for name in unseen if index.has_only_streams(name)]
    # The first rank reports files that no rank sees.
    here = here or [name for name in unseen if world.is_first and name not in lost]
    run_on_all_ranks(lambda: _check_files(folder, index, here, verify), world)
    return lost
