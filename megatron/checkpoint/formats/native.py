"""Read and write the native format by tensor name and box, with checksums, one tensor in memory at a time."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from megatron.checkpoint import CheckpointSource, TensorInfo, new_iteration
from megatron.core.dist_checkpointing import (
    FLOAT8_PREFIX,
    INDEX_FILE,
    MAX_SHARD_BYTES,
    RNG_PREFIX,
    CheckpointIndex,
    SequentialFile,
    ShardEntry,
    StoredFile,
    StoredShard,
    StoredTensor,
    check_file,
    check_geometry,
    check_run_state,
    checksum,
    dtype_name,
    dtype_of,
    encode_common,
    read_error,
    read_index,
    shard_header,
    shard_key,
    write_index,
)
from megatron.core.errors import DamagedCheckpointError
from megatron.core.object_store import as_path, local_copy
from megatron.core.ranged_file import RangedFile, open_ranged
from megatron.core.sharding import Box, describe_box, split_box, uncovered
from megatron.core.tokenizers import TOKENIZER_FOLDER


class NativeSource:
    """Tensors of a native iteration folder; implements `CheckpointSource`.

    A stored shard (at most 64 MiB, or one row) is always read completely and verified with its checksum; the last one
    is cached. Without ``verify`` checksums are not verified. Random number streams belong to the layout in ``common``,
    and FP8 scales to a run. Both are included only ``with_random_streams``, for a copy with the same layout. Without
    ``needs_streams``, a file that holds only random number streams may be lost. ``lost_streams`` is then a line about
    it, and no stream is included.

    Raises:
        DamagedCheckpointError: the index or a shard file is missing, truncated or modified.
    """

    def __init__(
        self, folder: str | Path, verify: bool = True, with_random_streams: bool = False, needs_streams: bool = True
    ) -> None:
        self.folder = as_path(folder)
        index = read_index(self.folder)
        check_run_state(self.folder, index.common)
        check_geometry(self.folder, index)
        damage, lost = [], []
        for name, file in index.files.items():
            try:
                check_file(self.folder / name, file, index.shards_of(name), verify)
            except DamagedCheckpointError as error:
                if needs_streams or not index.has_only_streams(name):
                    damage.append(str(error))
                else:
                    lost.append(name)
        if damage:
            raise DamagedCheckpointError("\n".join(damage))
        if verify and not index.is_intact:
            raise DamagedCheckpointError(f"{self.folder / INDEX_FILE}: does not match its checksum")
        self.lost_streams = replace(index, lost_streams=tuple(lost)).lost_streams_line(self.folder)
        self.common: Mapping[str, Any] = index.common
        self.stored: Mapping[str, StoredTensor] = {
            name: tensor
            for name, tensor in index.tensors.items()
            if (with_random_streams or not name.startswith((RNG_PREFIX, FLOAT8_PREFIX)))
            and not (lost and name.startswith(RNG_PREFIX))
        }
        self.tensors = {
            name: TensorInfo(tensor.global_shape, dtype_of(tensor.dtype)) for name, tensor in self.stored.items()
        }
        self.bytes_read = 0
        self._verify = verify
        self._files: dict[str, RangedFile] = {}
        self._shard: StoredShard | None = None
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it.

        Raises:
            KeyError: there is no tensor with this name.
            DamagedCheckpointError: a file is missing, truncated or modified, or a part of the box is not stored.
        """
        info = self.tensors[name]
        box = info.whole if box is None else box
        parts = [(shard, common) for shard in self.stored[name].shards if (common := box.intersect(shard.box))]
        gaps = uncovered(box, (common for _, common in parts))
        if gaps:
            raise DamagedCheckpointError(f"{self.folder}: no shard contains {name}{describe_box(gaps[0])}")
        values = torch.empty(box.shape, dtype=info.dtype)
        for shard, common in parts:
            stored = self._bytes_of(shard).view(info.dtype).view(shard.box.shape)
            place = common.relative_to(shard.box.offset)
            values[common.relative_to(box.offset).slices] = stored[place.slices]
        return values

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self._shard, self._buffer = None, torch.empty(0, dtype=torch.uint8)

    def _bytes_of(self, shard: StoredShard) -> torch.Tensor:
        if shard is self._shard:
            return self._buffer[: shard.num_bytes]
        if self._buffer.numel() < shard.num_bytes:
            self._buffer = torch.empty(shard.num_bytes, dtype=torch.uint8)
        self._shard = None  # the buffer holds no complete shard until the end
        data = self._buffer.numpy().data[: shard.num_bytes]
        path = self.folder / shard.file
        try:
            received = self._fill(data, shard)
        except OSError as error:
            raise read_error(f"{path}: cannot read {shard.key}", error) from error
        if received != shard.num_bytes:
            raise DamagedCheckpointError(f"{path}: ends within {shard.key}")
        if self._verify and checksum(data) != shard.checksum:
            raise DamagedCheckpointError(f"{path}: the bytes of {shard.key} do not match their checksum")
        self.bytes_read += received
        self._shard = shard
        return self._buffer[: shard.num_bytes]

    def _fill(self, data: memoryview, shard: StoredShard) -> int:
        """Fill ``data`` with the shard's bytes; return the number of bytes that the file had."""
        if shard.file not in self._files:
            self._files[shard.file] = open_ranged(self.folder / shard.file)  # closed by close()
        return self._files[shard.file].fill(data, shard.start)


@dataclass(frozen=True)
class PlannedShard:
    """Box of a tensor, planned as one entry of a shard file."""

    name: str
    info: TensorInfo
    box: Box

    @property
    def key(self) -> str:
        return shard_key(self.name, self.info.global_shape, self.box)

    @property
    def num_bytes(self) -> int:
        return self.box.num_elements * self.info.dtype.itemsize

    def describe(self) -> ShardEntry:
        """Return the entry without values; a header needs only the shape and dtype."""
        return ShardEntry(self.key, torch.empty(self.box.shape, dtype=self.info.dtype, device="meta"))


def plan_files(
    tensors: Sequence[tuple[str, TensorInfo]], max_file_bytes: int, max_shard_bytes: int = MAX_SHARD_BYTES
) -> list[list[PlannedShard]]:
    """Group tensors into files of about ``max_file_bytes``, largest dtypes first; a tensor is never in two files."""
    ordered = sorted(tensors, key=lambda item: (-item[1].dtype.itemsize, item[0]))
    files: list[list[PlannedShard]] = []
    room = 0
    for name, info in ordered:
        if not info.num_elements:
            continue
        if not files or info.num_bytes > room:
            files.append([])
            room = max_file_bytes
        room -= info.num_bytes
        boxes = split_box(info.whole, info.dtype.itemsize, max_shard_bytes)
        files[-1] += [PlannedShard(name, info, box) for box in boxes]
    return files


def write_streamed_shard(
    path: Path, shards: Sequence[PlannedShard], source: CheckpointSource
) -> tuple[StoredFile, list[tuple[str, StoredShard]]]:
    """Write one file and flush it to disk; one tensor of the source is in memory at a time.

    Raises:
        OSError: the file cannot be written.
    """
    header = shard_header([shard.describe() for shard in shards])
    written = []
    with SequentialFile(path, sum(shard.num_bytes for shard in shards)) as file:
        file.append(header)
        for shard, values in _values_of(shards, source):
            start = file.num_bytes
            crc = file.append(values.reshape(-1).view(torch.uint8).numpy())
            stored = StoredShard(shard.box, path.name, shard.key, start, file.num_bytes - start, f"{crc:08x}")
            written.append((shard.name, stored))
    return StoredFile(file.num_bytes, len(header), checksum(header)), written


def _values_of(shards: Sequence[PlannedShard], source: CheckpointSource) -> Iterator[tuple[PlannedShard, torch.Tensor]]:
    """Yield each shard's values, views of a tensor that is read once and released before the next one is read."""
    name, whole = "", torch.empty(0)
    for shard in shards:
        if shard.name != name:
            whole = torch.empty(0)
            name, whole = shard.name, source.read(shard.name)
            assert (tuple(whole.shape), whole.dtype) == (shard.info.global_shape, shard.info.dtype), (
                f"{name}: the source gave {dtype_name(whole.dtype)} {list(whole.shape)}"
            )
        # Tensors are split into shards along the first dimension, so that each shard is contiguous.
        yield shard, whole[shard.box.slices]


TokenizerWriter = Callable[[Path], bool]
MAX_FILE_BYTES = 4 * 1024**3
"""Size at which a new shard file is started; a larger tensor has its own file."""


def write_native(
    source: CheckpointSource,
    directory: str | Path,
    iteration: int | Literal["release"],
    max_file_bytes: int = MAX_FILE_BYTES,
    write_tokenizer: TokenizerWriter | None = None,
) -> Path:
    """Write the source's tensors and shared state as an iteration of ``directory``, and return its folder.

    The checkpoint loads at any layout; ``source.common`` determines the layout that it records. ``write_tokenizer``
    writes the tokenizer's record to the given folder and returns whether there is one. Without it the source's
    tokenizer is copied. The tracker file is written last, after everything else is on disk. The iteration's folder must
    not exist.

    Raises:
        CheckpointError: writing to the file system failed, or the shared state is not plain data.
    """
    needed = sum(info.num_bytes for info in source.tensors.values())
    with new_iteration(Path(directory), iteration, f"{needed}") as folder:
        _write_folder(source, folder, max_file_bytes, write_tokenizer)
    return folder


def _write_folder(
    source: CheckpointSource, folder: Path, max_file_bytes: int, write_tokenizer: TokenizerWriter | None
) -> None:
    has_tokenizer = _copy_tokenizer(source, folder) if write_tokenizer is None else write_tokenizer(folder)
    common = dict(source.common) | {"tokenizer": TOKENIZER_FOLDER if has_tokenizer else None}
    encode_common(common)
    shards: dict[str, list[StoredShard]] = {name: [] for name in source.tensors}
    files = {}
    for number, planned in enumerate(plan_files(list(source.tensors.items()), max_file_bytes)):
        path = folder / f"shard_{number:05d}.safetensors"
        files[path.name], written = write_streamed_shard(path, planned, source)
        for name, shard in written:
            shards[name].append(shard)
    tensors = {
        name: StoredTensor(name, info.global_shape, dtype_name(info.dtype), tuple(shards[name]))
        for name, info in source.tensors.items()
    }
    write_index(folder, CheckpointIndex(tensors, files, common))


def _copy_tokenizer(source: CheckpointSource, folder: Path) -> bool:
    """Copy the tokenizer's record and files; return whether the source has them."""
    recorded = source.common["tokenizer"]
    if recorded is None:
        return False
    shutil.copytree(local_copy(source.folder / recorded), folder / TOKENIZER_FOLDER)
    return True
