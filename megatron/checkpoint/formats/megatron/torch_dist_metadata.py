"""The ``.metadata`` file of torch.distributed.checkpoint: which bytes hold which box of a tensor."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import METADATA_FILE
from megatron.checkpoint.formats.megatron.torch_file_reader import (
    GlobalName,
    LazyTensor,
    Record,
    StorageKey,
    TorchFile,
    read_pickle,
)
from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.core.sharding import Box, describe_box, flat_range_boxes, uncovered

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
    """Location of one entry: a complete file in torch's zip format within a data file."""

    path: Path
    start: int
    num_bytes: int

    def open(self) -> TorchFile:
        """Open the entry.

        Raises:
            DamagedCheckpointError: the file is missing, truncated, or has other content at this location.
        """
        return TorchFile(self.path, (self.start, self.num_bytes))


@dataclass(frozen=True)
class StoredChunk:
    """Box of a stored tensor and the entry that holds its values."""

    box: Box
    segment: Segment


@dataclass(frozen=True)
class StoredEntry:
    """Stored tensor.

    ``original_shape`` is the shape of the tensor if it was flattened before it was split into chunks, and None if the
    chunks are boxes of the tensor.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    chunks: tuple[StoredChunk, ...]
    original_shape: tuple[int, ...] | None = None


@dataclass(frozen=True)
class StoredMetadata:
    """All stored tensors, and the entries of all stored objects, by key."""

    path: Path
    tensors: Mapping[str, StoredEntry]
    objects: Mapping[str, Segment]

    def segments(self) -> Iterator[tuple[str, Segment]]:
        """Yield (key, segment) of every entry."""
        for key, entry in self.tensors.items():
            for chunk in entry.chunks:
                yield key, chunk.segment
        yield from self.objects.items()

    def check_storages(self, keys: Collection[str] | None = None, index: int = 0, count: int = 1) -> None:
        """Verify the checksums of every ``count``-th entry, starting at ``index``; only entries of ``keys`` if given.

        Raises:
            DamagedCheckpointError: an entry does not match its stored checksum; the message names the tensor.
        """
        chosen = (item for item in self.segments() if keys is None or item[0] in keys)
        for key, segment in itertools.islice(chosen, index, None, count):
            file = segment.open()
            try:
                for storage in file.places:
                    file.check_storage(storage)
            except DamagedCheckpointError as error:
                raise DamagedCheckpointError(f"{error}; the file contains {key}") from error
            finally:
                file.close()


def read_metadata(folder: Path) -> StoredMetadata:
    """Read a folder's metadata and check it against the data files; the pickle is parsed without executing code.

    Raises:
        DamagedCheckpointError: the metadata are missing or invalid, or refer to missing bytes.
        CheckpointError: the pickle contains objects other than data.
    """
    path = folder / METADATA_FILE
    try:
        value = read_pickle(path.read_bytes(), path, _no_storage, _RECORDS)
        metadata = _interpreted(path, _attributes(value, "Metadata", "MCoreMetadata"))
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from error
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise DamagedCheckpointError(f"{path}: not valid checkpoint metadata ({error})") from error
    _check_files(metadata)
    return metadata


def _no_storage(description: Any) -> StorageKey:
    raise ValueError(f"a storage: {description}")


def _attributes(value: Any, *kinds: str) -> dict[str, Any]:
    if not isinstance(value, Record) or value.kind.name not in kinds:
        raise ValueError(f"{value!r} instead of a value of type {' or '.join(kinds)}")
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
    """Return the dtype in tensor properties, which newer versions of torch store as the first item of a tuple."""
    attributes = _attributes(properties, "TensorProperties")
    dtype = attributes["state"][0] if "state" in attributes else attributes["dtype"]
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{dtype!r} instead of a dtype")
    return dtype


def _file_name(name: Any) -> str:
    if not isinstance(name, str) or Path(name).name != name:
        raise ValueError(f"{name!r} instead of a file name")
    return name


def _sizes(values: Any) -> tuple[int, ...]:
    sizes = tuple(values)
    if not all(type(size) is int and size >= 0 for size in sizes):
        raise ValueError(f"{sizes} instead of sizes")
    return sizes


def _check_files(metadata: StoredMetadata) -> None:
    """Reject entries beyond the end of their files, and tensors larger than the files.

    Raises:
        DamagedCheckpointError: there is such an entry or tensor.
    """
    num_bytes: dict[Path, int] = {}
    for key, segment in metadata.segments():
        if segment.path not in num_bytes:
            try:
                num_bytes[segment.path] = segment.path.stat().st_size
            except OSError as error:
                message = (
                    f"{segment.path}: {os.strerror(error.errno or 0)}; according to {metadata.path} it contains {key}"
                )
                raise DamagedCheckpointError(message) from error
        if segment.start + segment.num_bytes > num_bytes[segment.path]:
            raise DamagedCheckpointError(f"{segment.path}: ends within {key}")
    for key, entry in metadata.tensors.items():
        for chunk in entry.chunks:
            if chunk.box.num_elements * entry.dtype.itemsize > chunk.segment.num_bytes:
                raise DamagedCheckpointError(
                    f"{metadata.path}: a chunk of {key} has shape {chunk.box.shape}, but only "
                    f"{chunk.segment.num_bytes} bytes"
                )
    needed = sum(c.box.num_elements * e.dtype.itemsize for e in metadata.tensors.values() for c in e.chunks)
    if needed > sum(num_bytes.values()):
        raise DamagedCheckpointError(
            f"{metadata.path}: the tensors need {needed} bytes, but the files have {sum(num_bytes.values())} bytes"
        )


@dataclass(frozen=True)
class StoredBox:
    """Location of the values of ``box`` in an entry.

    The entry's values from index ``start`` are those of ``frame``, in row-major order. ``frame`` is a box that contains
    ``box`` and may extend beyond the tensor. ``fields`` are the path to the tensor in an entry that holds several.
    """

    box: Box
    frame: Box
    segment: Segment
    start: int = 0
    fields: tuple[Any, ...] = ()


def chunk_boxes(entry: StoredEntry, is_stacked: bool) -> Iterator[tuple[int, StoredBox]]:
    """Yield (layer, box) of everything in a stored tensor; the layer is 0 for a tensor that is not stacked.

    Raises:
        CheckpointError: the chunks were flattened in a way that does not match the tensor's shape.
    """
    for chunk in entry.chunks:
        for box, start in _flattened(entry, chunk) if entry.original_shape is not None else ((chunk.box, 0),):
            if not is_stacked:
                yield 0, StoredBox(box, box, chunk.segment, start)
                continue
            inner = Box(box.offset[1:], box.shape[1:])
            for number in range(box.shape[0]):
                first = start + number * inner.num_elements
                yield box.offset[0] + number, StoredBox(inner, inner, chunk.segment, first)


def _flattened(entry: StoredEntry, chunk: StoredChunk) -> Iterator[tuple[Box, int]]:
    """Yield (box, first value) of a chunk whose tensor was split into a grid of equal tiles and flattened per tile.

    Shapes: the stored tensor is ``[tiles along dim 0, ..., tiles along dim n, values of a tile]``.
    """
    assert entry.original_shape is not None
    grid, whole = entry.shape[:-1], entry.original_shape
    fits = len(grid) == len(whole) and all(cells and size % cells == 0 for size, cells in zip(whole, grid))
    cell = tuple(size // cells for size, cells in zip(whole, grid)) if fits else ()
    if not fits or math.prod(cell) != entry.shape[-1] or math.prod(chunk.box.shape[:-1]) != 1:
        raise CheckpointError(f"{chunk.segment.path}: a tensor of shape {whole} was flattened as {entry.shape}")
    corner = [index * size for index, size in zip(chunk.box.offset, cell)]
    start = 0
    for box in flat_range_boxes(cell, chunk.box.offset[-1], chunk.box.offset[-1] + chunk.box.shape[-1]):
        yield Box(tuple(a + b for a, b in zip(corner, box.offset, strict=True)), box.shape), start
        start += box.num_elements


class BoxReader:
    """Read boxes of native tensors from entries; the last opened file is kept open for the next read."""

    def __init__(self) -> None:
        self._last: tuple[Segment, TorchFile] | None = None

    def read(self, name: str, box: Box, dtype: torch.dtype, stored: Sequence[StoredBox]) -> torch.Tensor:
        """Assemble a contiguous CPU tensor of a box from the stored boxes that overlap it.

        Raises:
            DamagedCheckpointError: an entry does not match the metadata, or a part of the box is not stored.
        """
        parts = [(part, common) for part in stored if (common := part.box.intersect(box)) is not None]
        gaps = uncovered(box, (common for _, common in parts))
        if gaps:
            raise DamagedCheckpointError(f"no chunk contains {name}{describe_box(gaps[0])}")
        result = torch.empty(box.shape, dtype=dtype)
        for part, common in parts:
            file = self.open(part.segment)
            values = self._framed(part, file, dtype, name)
            result[common.relative_to(box.offset).slices] = values[common.relative_to(part.frame.offset).slices]
            file.release_pages()
        return result

    def open(self, segment: Segment) -> TorchFile:
        """Return the open file of an entry, which is valid until the next entry is opened.

        Raises:
            DamagedCheckpointError: the file is missing or damaged.
        """
        if self._last is None or self._last[0] != segment:
            self.close()
            self._last = (segment, segment.open())
        return self._last[1]

    def close(self) -> None:
        if self._last is not None:
            self._last[1].close()
            self._last = None

    @staticmethod
    def _framed(part: StoredBox, file: TorchFile, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return the values of a box's frame in file order."""
        tensor: Any = file.value
        for field in part.fields:
            tensor = tensor[field]
        end = part.start + part.frame.num_elements
        if not isinstance(tensor, LazyTensor) or tensor.dtype != dtype or tensor.num_elements < end:
            raise DamagedCheckpointError(f"{file.path}: the entry at byte {part.segment.start} does not contain {name}")
        return file.view(tensor).reshape(-1)[part.start : end].view(part.frame.shape)
