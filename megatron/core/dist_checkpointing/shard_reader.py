"""Read the shards of a load plan from shard files, on this node or another, and verify checksums."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import torch

from megatron.core.collectives import all_gather_objects, any_rank, broadcast_object, run_on_all_ranks
from megatron.core.dist_checkpointing.disk import join_checksums, partial_checksum, read_error
from megatron.core.dist_checkpointing.index import StoredShard, StoredTensor
from megatron.core.dist_checkpointing.planner import Cell, ShardRead, dtype_of
from megatron.core.errors import CheckpointError, DamagedCheckpointError, InputError
from megatron.core.process_group import Group
from megatron.core.ranged_file import RangedFile, open_ranged, read_range
from megatron.core.sharding import Box

_Place = tuple[str, int, int]
"""File, first byte and number of bytes of a shard."""


@dataclass(frozen=True)
class CellChecksum:
    """Contribution of a cell, read by one rank, to the checksum of the shard at ``start`` in ``file``."""

    file: str
    start: int
    box: Box
    checksum: int


class ShardReader:
    """Reader of the shard files of one checkpoint folder; a context manager that closes them.

    It reads exactly the bytes of a plan's cells. With ``verify`` the checksum of a shard that is read whole is verified
    at once. The contributions of cells of other shards are collected in ``cell_checksums``, for `check_shards`.
    ``bytes_read`` counts the bytes read from storage. One buffer, of the largest cell's size, is reused for all reads.
    """

    def __init__(self, folder: Path, verify: bool = True) -> None:
        self.bytes_read = 0
        self.cell_checksums: list[CellChecksum] = []
        self._folder = folder
        self._verify = verify
        self._open: dict[str, RangedFile] = {}
        self._shard_bytes: bytes | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def __enter__(self) -> ShardReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()

    def read(self, read: ShardRead, targets: Sequence[torch.Tensor], shard_bytes: bytes | None = None) -> None:
        """Read one shard's cells and copy them to their targets in place.

        If ``shard_bytes``, the contents of the whole shard, is given, the file is not read.

        Raises:
            DamagedCheckpointError: the file is missing, truncated or modified.
        """
        shard = read.shard
        self._shard_bytes = shard_bytes
        checksums = []
        for cell in read.cells:
            values, checksum = self._read_cell(read.tensor, shard, cell)
            checksums.append(CellChecksum(shard.file, shard.start, cell.box, checksum))
            for copy in cell.copies:
                targets[copy.target][copy.destination.slices].copy_(values)
        if not self._verify:
            return
        if read.is_whole and join_checksums((cell.checksum for cell in checksums), shard.num_bytes) != shard.checksum:
            raise _mismatch(self._folder, shard)
        if not (read.is_whole and len(checksums) == 1):
            # Other ranks may read some of these cells and need the others to verify the shard.
            self.cell_checksums += checksums

    def _read_cell(self, tensor: StoredTensor, shard: StoredShard, cell: Cell) -> tuple[torch.Tensor, int]:
        """Read a cell into the buffer; return its values and its contribution to the shard's checksum."""
        dtype = dtype_of(tensor.dtype)
        num_bytes = cell.box.num_elements * dtype.itemsize
        if self._buffer.numel() < num_bytes:
            self._buffer = torch.empty(num_bytes, dtype=torch.uint8)
        data = self._buffer.numpy().data[:num_bytes]
        run_bytes, starts = contiguous_runs(shard.box.shape, cell.box, dtype.itemsize)
        runs = self._read_runs(shard, data, run_bytes, starts)
        try:
            checksum = 0
            if self._verify:
                checksum = partial_checksum(runs, shard.num_bytes)
            else:
                for _ in runs:
                    pass
        except OSError as error:
            raise read_error(f"{self._folder / shard.file}: cannot read {shard.key}", error) from error
        return self._buffer[:num_bytes].view(dtype).view(cell.box.shape), checksum

    def _read_runs(
        self, shard: StoredShard, data: memoryview, run_bytes: int, starts: Iterable[int]
    ) -> Iterator[tuple[int, memoryview]]:
        """Fill ``data`` run by run; yield each run's offset in the shard and its bytes."""
        if self._shard_bytes is None:
            starts = self._file(shard.file).announce(shard.start, run_bytes, starts)
        for number, start in enumerate(starts):
            run = data[number * run_bytes : (number + 1) * run_bytes]
            if self._shard_bytes is None:
                received = self._file(shard.file).fill(run, shard.start + start)
            else:
                part = self._shard_bytes[start : start + run_bytes]
                run[: len(part)] = part
                received = len(part)
            self.bytes_read += received
            if received != run_bytes:
                raise DamagedCheckpointError(f"{self._folder / shard.file}: ends within {shard.key}")
            yield start, run

    def _file(self, name: str) -> RangedFile:
        if name not in self._open:
            self._open[name] = open_ranged(self._folder / name)  # closed by __exit__
        return self._open[name]


def contiguous_runs(shape: Sequence[int], box: Box, itemsize: int) -> tuple[int, Iterable[int]]:
    """Return the size in bytes and the offsets of the contiguous runs of a box in a row-major tensor of ``shape``."""
    split = len(shape)
    while split and box.shape[split - 1] == shape[split - 1]:
        split -= 1
    # All dims after the last one that the box splits are whole, so a range of that dim is contiguous.
    split = max(split - 1, 0)
    strides = [math.prod(shape[dim + 1 :]) * itemsize for dim in range(len(shape))]
    base = sum(offset * stride for offset, stride in zip(box.offset, strides, strict=True))
    steps = [range(0, length * stride, stride) for length, stride in zip(box.shape[:split], strides)]
    run_bytes = math.prod(box.shape[split:]) * itemsize
    return run_bytes, (base + sum(step) for step in itertools.product(*steps))


def check_shards(
    folder: Path, tensors: Mapping[str, StoredTensor], cell_checksums: Iterable[Sequence[CellChecksum]]
) -> None:
    """Verify the checksums of shards that no rank read whole, from the contributions of all ranks' cells.

    Raises:
        DamagedCheckpointError: a shard's bytes are not the written ones, or two ranks read different bytes.
    """
    cells: dict[tuple[str, int], dict[Box, int]] = {}
    differing: set[tuple[str, int]] = set()
    for cell in itertools.chain.from_iterable(cell_checksums):
        place = (cell.file, cell.start)
        if cells.setdefault(place, {}).setdefault(cell.box, cell.checksum) != cell.checksum:
            differing.add(place)
    if not cells:
        return
    shards = {
        (shard.file, shard.start): shard for tensor in tensors.values() for shard in tensor.shards if shard.num_bytes
    }
    for place in sorted(cells):
        shard, found = shards[place], cells[place]
        covered = sum(box.num_elements for box in found)
        assert covered == shard.box.num_elements, f"{shard.key}: {covered} elements were read"
        if place in differing or join_checksums(found.values(), shard.num_bytes) != shard.checksum:
            raise _mismatch(folder, shard)


def read_remote_shards(
    reader: ShardReader, folder: Path, reads: Sequence[ShardRead], targets: Sequence[torch.Tensor], world: Group
) -> CheckpointError | None:
    """Read shards from files that this rank cannot see; collective, also for ranks without such reads.

    For each file, the first rank that sees it reads the requested shards and broadcasts them: one whole shard at a
    time, so that no rank holds more than one. This suits replicated weights, of which each node wrote a part; for a
    checkpoint that is entirely on one node it is slow. Returns the error of a shard on this rank, if any.

    Raises:
        DamagedCheckpointError: no rank sees a file, or it cannot be read. All ranks raise.
        StorageError: the file system or object store of a file does not respond. All ranks raise.
    """
    own = {_place(read): read for read in reads}
    if not any_rank(bool(own), world):
        return None
    places = sorted({place for found in all_gather_objects(list(own), world) for place in found})
    senders = _find_senders(folder, sorted({file for file, _, _ in places}), world)
    error: CheckpointError | None = None
    for place in places:
        sender = senders[place[0]]
        sent = _read_bytes(folder, place) if world.rank == sender else None
        received = broadcast_object(sent, world, sender)
        if isinstance(received, InputError):
            raise received
        if place in own and error is None:
            try:
                reader.read(own[place], targets, shard_bytes=received)
            except CheckpointError as failure:
                error = failure
    return error


def _find_senders(folder: Path, files: Sequence[str], world: Group) -> dict[str, int]:
    """Return the group index of the first rank that sees each file."""
    senders: dict[str, int] = {}
    here = run_on_all_ranks(lambda: [name for name in files if (folder / name).exists()], world)
    for number, seen in enumerate(all_gather_objects(here, world)):
        for name in seen:
            senders.setdefault(name, number)
    missing = [name for name in files if name not in senders]
    if missing:
        raise DamagedCheckpointError(
            f"{folder}: no rank of this run finds {', '.join(missing)}; include the nodes that wrote these files in "
            "this run, or copy the files to a node of this run"
        )
    return senders


def _read_bytes(folder: Path, place: _Place) -> bytes | InputError:
    name, start, num_bytes = place
    try:
        with closing(open_ranged(folder / name)) as file:
            return read_range(file, start, num_bytes)
    except OSError as failure:
        return read_error(str(folder / name), failure)


def _place(read: ShardRead) -> _Place:
    return (read.shard.file, read.shard.start, read.shard.num_bytes)


def _mismatch(folder: Path, shard: StoredShard) -> DamagedCheckpointError:
    return DamagedCheckpointError(f"{folder / shard.file}: the bytes of {shard.key} do not match their checksum")
