"""Write a rank's shard file, and check that a stored file is complete and undamaged."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.dist_checkpointing.async_save import StagingArea
from megatron.core.dist_checkpointing.disk import SequentialFile, checksum, read_error, sync_folder, write_error
from megatron.core.dist_checkpointing.index import CheckpointIndex, StoredFile, StoredShard, StoredTensor
from megatron.core.dist_checkpointing.planner import SavePlan, ShardedTensor, TensorDescription, dtype_of, shard_key
from megatron.core.errors import DamagedCheckpointError
from megatron.core.object_store import ObjectPath, UploadedFile
from megatron.core.ranged_file import open_ranged, read_range
from megatron.core.safe_io import parse_json

_SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LENGTH_BYTES = 8
MAX_FILES_PER_FOLDER = 1024
"""Larger worlds write to subfolders, because parallel file systems serialize file creation within a folder."""


@dataclass(frozen=True, eq=False)
class ShardEntry:
    """Entry of a shard file; ``values`` may be a view on any device."""

    key: str
    values: torch.Tensor


@dataclass(frozen=True)
class WrittenShare:
    """Result of a rank's write: its file, or None if it wrote none, and the checksum of each entry in order."""

    file: StoredFile | None
    checksums: tuple[str, ...]


@dataclass(frozen=True, eq=False)
class RankShare:
    """The part of a checkpoint that this rank writes, widest dtypes first."""

    file_name: str
    entries: tuple[ShardEntry, ...]

    def staged(self, area: StagingArea) -> RankShare:
        """Return the same share with a copy of its values, which training no longer modifies."""
        copies = area.copy([entry.values for entry in self.entries])
        return replace(self, entries=tuple(replace(entry, values=copy) for entry, copy in zip(self.entries, copies)))

    def write(self, folder: Path) -> WrittenShare:
        """Write the share into an existing folder and sync it to disk; an empty share writes no file.

        Raises:
            CheckpointWriteError: the file system reported an error; the partial file has been deleted.
        """
        if not self.entries:
            return WrittenShare(None, ())
        path = folder / self.file_name
        try:
            if isinstance(path, ObjectPath):
                return path.retry(lambda: write_shard(path, self.entries))
            if path.parent == folder:
                return write_shard(path, self.entries)
            path.parent.mkdir(exist_ok=True)
            written = write_shard(path, self.entries)
            sync_folder(path.parent)
            return written
        except OSError as failure:
            path.unlink(missing_ok=True)
            raise write_error(path, failure, shard_bytes(self.entries)) from failure


def take_share(plan: SavePlan, tensors: Sequence[ShardedTensor], rank: int, num_ranks: int, tag: str = "") -> RankShare:
    """Return the share of ``rank``, this rank, of ``num_ranks``, according to the plan for its tensors.

    A ``tag`` distinguishes its file from files of other saves.
    """
    by_name: dict[str, list[ShardedTensor]] = {}
    for tensor in tensors:
        if tensor.is_owner:
            by_name.setdefault(tensor.name, []).append(tensor)
    entries = []
    for planned in plan.own:
        for box in planned.boxes:
            views = (tensor.view(box) for tensor in by_name[planned.name])
            values = next(view for view in views if view is not None)
            entries.append(ShardEntry(shard_key(planned.name, planned.global_shape, box), values))
    return RankShare(shard_name(rank, num_ranks, tag), tuple(entries))


def shard_name(rank: int, num_ranks: int, tag: str = "") -> str:
    """Return the name of a rank's shard file, with its subfolder in large worlds.

    A name with a ``tag`` is used in object stores, which have no folders.
    """
    name = ".".join((f"shard_{rank:05d}", *filter(None, (tag,)), "safetensors"))
    if tag or num_ranks <= MAX_FILES_PER_FOLDER:
        return name
    return f"shards_{rank // MAX_FILES_PER_FOLDER:05d}/{name}"


def build_index(
    plan: SavePlan, shares: Sequence[WrittenShare], common: Mapping[str, Any], tag: str = ""
) -> CheckpointIndex:
    """Build the index of a checkpoint from the written shares in rank order; for the first rank."""
    planned: dict[str, TensorDescription] = {}
    shards: dict[str, list[StoredShard]] = {}
    for rank, (own, share) in enumerate(zip(plan.ranks, shares, strict=True)):
        start = 0 if share.file is None else share.file.header_bytes
        file = shard_name(rank, len(shares), tag)
        checksums = iter(share.checksums)
        for tensor in own:
            name, shape = tensor.name, tensor.global_shape
            planned[name] = tensor
            stored = shards.setdefault(name, [])
            for box in tensor.boxes:
                num_bytes = box.num_elements * dtype_of(tensor.dtype).itemsize
                key = shard_key(name, shape, box)
                stored.append(StoredShard(box, file, key, start, num_bytes, next(checksums)))
                start += num_bytes
    tensors = {
        name: StoredTensor(
            name, tensor.global_shape, tensor.dtype, tuple(sorted(shards[name], key=lambda shard: shard.box.offset))
        )
        for name, tensor in planned.items()
    }
    files = {
        shard_name(rank, len(shares), tag): share.file for rank, share in enumerate(shares) if share.file is not None
    }
    return CheckpointIndex(tensors, files, common)


def shard_header(entries: Sequence[ShardEntry]) -> bytes:
    """Return the safetensors header for the entries in their order, including its length field."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.values.numel() * entry.values.element_size()
        fields[entry.key] = {
            "dtype": _SAFETENSORS_DTYPES[entry.values.dtype],
            "shape": list(entry.values.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def write_shard(path: Path, entries: Sequence[ShardEntry]) -> WrittenShare:
    """Write entries to a safetensors file and sync it to disk; only one entry at a time is copied.

    Entries with the widest dtypes must come first, so that every entry is aligned in the file.

    Raises:
        OSError: the file cannot be written.
    """
    header = shard_header(entries)
    num_bytes = shard_bytes(entries)
    with UploadedFile(path, num_bytes) if isinstance(path, ObjectPath) else SequentialFile(path, num_bytes) as file:
        file.append(header)
        checksums = tuple(f"{file.append(_bytes_of(entry.values)):08x}" for entry in entries)
    return WrittenShare(StoredFile(file.num_bytes, len(header), checksum(header)), checksums)


def shard_bytes(entries: Sequence[ShardEntry]) -> int:
    """Return the size of the file that `write_shard` writes for the entries."""
    data_bytes = sum(entry.values.numel() * entry.values.element_size() for entry in entries)
    return len(shard_header(entries)) + data_bytes


def check_file(path: Path, expected: StoredFile, shards: Sequence[StoredShard], verify: bool = True) -> None:
    """Compare a shard file's size, and with ``verify`` its header, with the index.

    Raises:
        DamagedCheckpointError: the file is missing or differs; the message names the lost shards.
        StorageError: the file system or object store of the file does not respond.
    """
    try:
        with closing(open_ranged(path)) as file:
            num_bytes = file.num_bytes
            header = read_range(file, 0, expected.header_bytes) if verify else b""
    except OSError as error:
        raise read_error(str(path), error, _name_some({shard.key for shard in shards})) from error
    if num_bytes != expected.num_bytes:
        problem = f"has {num_bytes} bytes, but {expected.num_bytes} were written"
    elif verify and checksum(header) != expected.header_checksum:
        problem = "the header does not match its checksum"
    else:
        return
    lost = _name_some({shard.key for shard in shards} - readable_keys(path))
    raise DamagedCheckpointError(f"{path}: {problem}{lost}")


def _name_some(keys: set[str]) -> str:
    """Return the end of a message that lists lost tensors; long lists are abbreviated."""
    names = sorted(keys)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"; lost: {', '.join(names[:20])}{more}" if names else ""


def readable_keys(path: Path) -> set[str]:
    """Return the keys in a safetensors file's header whose data are within the file."""
    try:
        with closing(open_ranged(path)) as file:
            num_bytes = file.num_bytes
            length = int.from_bytes(read_range(file, 0, _LENGTH_BYTES), "little")
            fields = parse_json(read_range(file, _LENGTH_BYTES, length).decode("utf-8"))
        data_bytes = num_bytes - _LENGTH_BYTES - length
        return {
            key
            for key, entry in fields.items()
            if key != "__metadata__" and int(entry["data_offsets"][1]) <= data_bytes
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError):
        # Without a readable header no entry can be read.
        return set()


def _bytes_of(values: torch.Tensor) -> NDArray[np.uint8]:
    flat = values.detach().to("cpu").contiguous().reshape(-1)
    bytes_of_values: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return bytes_of_values
