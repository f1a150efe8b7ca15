"""The file ``.metadata`` of a folder that torch.distributed.checkpoint wrote: which bytes hold which box of what."""

from __future__ import annotations

import itertools
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.sharding import Box
from megatron.interop.megatron_torch.pickle_reader import read_pickle
from megatron.interop.megatron_torch.stored_values import GlobalName, Record, StorageKey
from megatron.interop.megatron_torch.torch_file import TorchFile
from megatron.interop.torch_dist.folder_files import METADATA_FILE

_CHECKPOINT, _SHARD = "torch.distributed.checkpoint", "torch.distributed._shard"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"
_CLASSES: Mapping[str, tuple[str, ...]] = {
    f"{_CHECKPOINT}.metadata": (
        *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING"),
    ),
    f"{_CHECKPOINT}.filesystem": ("_StorageInfo",),
    f"{_CHECKPOINT}.planner": ("SavePlan", "WriteItem", "WriteItemType", "TensorWriteData"),
    f"{_SHARD}.metadata": ("ShardMetadata",),
    f"{_SHARD}.sharded_tensor.metadata": ("TensorProperties", "MEM_FORMAT_ENCODING"),
    "torch.serialization": ("_get_layout",),
    "pathlib": ("PurePosixPath",),
    "pathlib._local": ("PosixPath", "PurePosixPath"),
    _MEGATRON: ("MCoreMetadata", "MCoreSavePlan"),
}
_RECORDS = tuple(GlobalName(module, name) for module, names in _CLASSES.items() for name in names)
_ORIGINAL_SHAPE = "nd_reformulated_orig_global_shape"


@dataclass(frozen=True)
class Segment:
    """Say where one entry lies: a whole file of torch's zip format within a data file."""

    path: Path
    start: int
    num_bytes: int

    def open(self) -> TorchFile:
        """Open the entry.

        Raises:
            DamagedCheckpointError: its file is missing, or cut short, or holds something else there.
        """
        return TorchFile(self.path, (self.start, self.num_bytes))


@dataclass(frozen=True)
class StoredChunk:
    """Pair a box of a stored tensor with the entry that holds its values."""

    box: Box
    segment: Segment


@dataclass(frozen=True)
class StoredEntry:
    """Describe a stored tensor.

    ``original_shape`` is that of the tensor itself where chunks of it were flattened before they were cut; None where
    the chunks are boxes of it.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]
    original_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StoredMetadata:
    """Hold every stored tensor, and the entry of every stored object, by key."""

    path: Path
    tensors: Mapping[str, StoredEntry]
    objects: Mapping[str, Segment]

    def segments(self) -> Iterator[tuple[str, Segment]]:
        """Yield every entry and its key."""
        for key, entry in self.tensors.items():
            for chunk in entry.chunks:
                yield key, chunk.segment
        yield from self.objects.items()

    def check_storages(self, keys: Collection[str] | None = None, index: int = 0, count: int = 1) -> None:
        """Compare the checksums of every ``count``-th entry, from number ``index`` on; only ``keys`` where given.

        Raises:
            DamagedCheckpointError: an entry does not match the checksum beside it; the tensor is named.
        """
        chosen = (item for item in self.segments() if keys is None or item[0] in keys)
        for key, segment in itertools.islice(chosen, index, None, count):
            file = segment.open()
            try:
                for storage in file.places:
                    file.check_storage(storage)
            except DamagedCheckpointError as error:
                raise DamagedCheckpointError(f"{error}; it holds {key}") from error
            finally:
                file.close()


def read_metadata(folder: Path) -> StoredMetadata:
    """Read the metadata of a folder and hold it against the files that are there; nothing of the pickle is run.

    Raises:
        DamagedCheckpointError: it is missing or cannot be understood, or names bytes that are not there.
        CheckpointError: it asks for what is not data.
    """
    path = folder / METADATA_FILE
    try:
        value = read_pickle(path.read_bytes(), path, _no_storage, _RECORDS)
        metadata = _interpreted(path, _attributes(value, "Metadata", "MCoreMetadata"))
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedCheckpointError(f"{path}: not the metadata of a checkpoint ({error})") from error
    _check_files(metadata)
    return metadata


def _no_storage(description: Any) -> StorageKey:
    raise ValueError(f"a storage: {description}")


def _attributes(value: Any, *kinds: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.kind.name not in kinds:
        raise ValueError(f"{value!r} in the place of {' or '.join(kinds)}")
    return value.attributes


def _interpreted(path: Path, values: Mapping[str, Any]) -> StoredMetadata:
    places: dict[tuple[str, tuple[int, ...] | None], Segment] = {}
    for index, info in values["storage_data"].items():
        named, place = _attributes(index, "MetadataIndex"), _attributes(info, "_StorageInfo")
        if place.get("transform_descriptors"):
            raise CheckpointError(
                f"{path}: its values are transformed ({place['transform_descriptors']}), which is not supported; save "
                "without extensions of torch.distributed.checkpoint"
            )
        offset = None if named.get("offset") is None else _sizes(named["offset"])
        places[named["fqn"], offset] = Segment(
            path.parent / _file_name(place["relative_path"]), *_sizes((place["offset"], place["length"]))
        )
    tensors: dict[str, StoredEntry] = {}
    objects: dict[str, Segment] = {}
    extra = values.get("mcore_data") or {}
    for key, described in values["state_dict_metadata"].items():
        if described.kind.name == "BytesStorageMetadata":
            objects[str(key)] = places[key, None]
            continue
        stored = _attributes(described, "TensorStorageMetadata")
        original = (extra.get(key) or {}).get(_ORIGINAL_SHAPE)
        shape = _sizes(stored["size"])
        tensors[str(key)] = StoredEntry(
            shape,
            _dtype(stored["properties"]),
            tuple(_chunk(key, shape, _attributes(c, "ChunkStorageMetadata"), places) for c in stored["chunks"]),
            None if original is None else _sizes(original),
        )
    return StoredMetadata(path, tensors, objects)


def _chunk(
    key: str,
    shape: tuple[int, ...],
    chunk: Mapping[str, Any],
    places: Mapping[tuple[str, tuple[int, ...] | None], Segment],
) -> StoredChunk:
    box = Box(_sizes(chunk["offsets"]), _sizes(chunk["sizes"]))
    ends = (start + length for start, length in zip(box.offset, box.shape, strict=True))
    if any(end > size for end, size in zip(ends, shape, strict=True)):
        raise ValueError(f"a chunk of {key} at {box.offset} of shape {box.shape} is outside of {shape}")
    return StoredChunk(box, places[key, box.offset])


def _dtype(properties: Any) -> torch.dtype:
    """Return the dtype of a record of properties, the first of the tuple that newer versions of torch store."""
    attributes = _attributes(properties, "TensorProperties")
    dtype = attributes["state"][0] if "state" in attributes else attributes["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} in the place of a dtype")
    return dtype


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{name!r} in the place of a file's name")
    return name


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} in the place of sizes")
    return sizes


def _check_files(metadata: StoredMetadata) -> None:
    """Refuse entries beyond the end of their files, and tensors that have more values than the files have bytes.

    Raises:
        DamagedCheckpointError: there are such.
    """
    num_bytes: dict[Path, int] = {}
    for key, segment in metadata.segments():
        if segment.path not in num_bytes:
            try:
                num_bytes[segment.path] = segment.path.stat().st_size
            except OSError as error:
                message = f"{segment.path}: {os.strerror(error.errno or 0)}; {metadata.path} says it holds {key}"
                raise DamagedCheckpointError(message) from error
        if segment.start + segment.num_bytes > num_bytes[segment.path]:
            raise DamagedCheckpointError(f"{segment.path}: ends within {key}")
    for key, entry in metadata.tensors.items():
        for chunk in entry.chunks:
            if chunk.box.num_elements * entry.dtype.itemsize > chunk.segment.num_bytes:
                raise DamagedCheckpointError(
                    f"{metadata.path}: a chunk of {key} of shape {chunk.box.shape} in {chunk.segment.num_bytes} bytes"
                )
    needed = sum(c.box.num_elements * e.dtype.itemsize for e in metadata.tensors.values() for c in e.chunks)
    if needed > sum(num_bytes.values()):
        raise DamagedCheckpointError(
            f"{metadata.path}: tensors of {needed} bytes in files of {sum(num_bytes.values())} bytes"
        )
