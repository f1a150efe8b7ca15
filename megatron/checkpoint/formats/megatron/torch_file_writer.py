"""Write files in torch.save's zip format whose tensors are filled incrementally by one or more processes."""

from __future__ import annotations

import argparse
import io
import itertools
import math
import os
import pickle
import struct
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._utils

from megatron.checkpoint.formats.megatron.torch_file_reader import contiguous_strides
from megatron.core.sharding import Box

_PROTOCOL = 2  # torch's default

_STORAGES: Mapping[torch.dtype, type] = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.uint8: torch.ByteStorage,
}


@dataclass(frozen=True, eq=False)
class PlannedTensor:
    """Placeholder for a tensor with its own storage in a checkpoint's values; without ``values`` it is filled later."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    values: torch.Tensor | None = None

    @property
    def num_elements(self) -> int:
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        return self.num_elements * self.dtype.itemsize


def given_tensor(values: torch.Tensor) -> PlannedTensor:
    """Plan a small tensor whose values are already known."""
    values = values.detach().to("cpu").contiguous()
    return PlannedTensor(values.dtype, tuple(values.shape), values)


def namespace(values: Mapping[str, Any]) -> object:
    """Convert values to a namespace, the type of Megatron-LM's ``args``."""
    return argparse.Namespace(**values)


def pickle_values(value: Any, key_of: Callable[[PlannedTensor], str]) -> bytes:
    """Pickle a value with `PlannedTensor` as tensors; ``key_of`` names their storages."""
    stream = io.BytesIO()
    _Pickler(stream, key_of).dump(value)
    return stream.getvalue()


def planned_tensors(value: Any) -> list[PlannedTensor]:
    """Return the planned tensors in a value, in order."""
    if isinstance(value, PlannedTensor):
        return [value]
    if isinstance(value, Mapping):
        return [tensor for item in value.values() for tensor in planned_tensors(item)]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in planned_tensors(item)]
    return []


@dataclass(frozen=True)
class _Storage:
    """Storage of a planned tensor in the file."""

    tensor: PlannedTensor


class _Pickler(pickle.Pickler):
    def __init__(self, stream: io.BytesIO, key_of: Callable[[PlannedTensor], str]) -> None:
        super().__init__(stream, protocol=_PROTOCOL)
        self._key_of = key_of

    def persistent_id(self, obj: Any) -> Any:
        if not isinstance(obj, _Storage):
            return None
        tensor = obj.tensor
        return ("storage", _STORAGES[tensor.dtype], self._key_of(tensor), "cpu", tensor.num_elements)

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, PlannedTensor):
            return NotImplemented
        no_hooks: OrderedDict[str, object] = OrderedDict()
        arguments = (_Storage(obj), 0, obj.shape, contiguous_strides(obj.shape), False, no_hooks)
        return torch._utils._rebuild_tensor_v2, arguments


_ALIGNMENT = 64  # of the first byte of every entry, as in torch
_LIMIT = 0xFFFFFFFF  # sizes and offsets from this value need zip64 fields
_UTF8 = 0x0800
_VERSION = 45
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_DIRECTORY_HEADER = struct.Struct("<4s6H3L5H2L")
_END64 = struct.Struct("<4sQ2H2L4Q")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END = struct.Struct("<4s4H2LH")
_CHUNK_BYTES = 16 * 1024 * 1024
_DATE_1980 = 0x21


@dataclass
class _Entry:
    """Location of one entry, its data if known, and its partial checksum."""

    name: str
    num_bytes: int
    header_start: int
    data_start: int
    data: bytes | None = None
    summed_bytes: int = 0
    checksum: int = 0


@dataclass(frozen=True, eq=False)
class TorchFilePlan:
    """Layout of a file. Tensors come first, so that their offsets do not depend on other values.

    Every process that plans a file with the same tensors gets the same offsets.
    """

    path: Path
    entries: tuple[_Entry, ...]
    of_tensor: dict[int, _Entry] = field(repr=False)
    tensors: tuple[PlannedTensor, ...] = field(repr=False)

    @property
    def end(self) -> int:
        """Return the offset of the zip directory."""
        last = self.entries[-1]
        return last.data_start + last.num_bytes


def plan_torch_file(path: Path, value: Any) -> TorchFilePlan:
    """Plan the file of a value that has `PlannedTensor` as tensors."""
    tensors = planned_tensors(value)
    keys = {id(tensor): str(number) for number, tensor in enumerate(tensors)}
    assert len(keys) == len(tensors), "a tensor is planned once"
    pickled = pickle_values(value, lambda tensor: keys[id(tensor)])
    contents: list[tuple[str, int, bytes | None]] = [
        (f"data/{keys[id(tensor)]}", tensor.num_bytes, None) for tensor in tensors
    ]
    small = (
        ("data.pkl", pickled),
        (".format_version", b"1"),
        (".storage_alignment", str(_ALIGNMENT).encode()),
        ("byteorder", b"little"),
        ("version", b"3\n"),
        (".data/serialization_id", f"{zlib.crc32(pickled):040d}".encode()),
    )
    contents += [(name, len(data), data) for name, data in small]
    entries = tuple(_place(path.stem, contents))
    of_tensor = {id(tensor): entry for tensor, entry in zip(tensors, entries)}
    return TorchFilePlan(path, entries, of_tensor, tuple(tensors))


class TorchFileWriter:
    """Planned file open for writing. One process creates and finishes it; all may write boxes in between.

    Raises:
        OSError: the file cannot be written; every method may raise this.
    """

    def __init__(self, plan: TorchFilePlan, create: bool) -> None:
        self.plan = plan
        self._descriptor = os.open(plan.path, os.O_RDWR | (os.O_CREAT | os.O_TRUNC if create else 0), 0o666)
        if create:
            os.ftruncate(self._descriptor, plan.end)
            for entry in plan.entries:
                if entry.data is not None:
                    self._write(entry, 0, memoryview(entry.data))
            for tensor in plan.tensors:
                if tensor.values is not None:
                    self.write_box(tensor, tensor.shape, 0, Box((0,) * len(tensor.shape), tensor.shape), tensor.values)

    def write_box(
        self, tensor: PlannedTensor, shape: tuple[int, ...], start: int, box: Box, values: torch.Tensor
    ) -> None:
        """Write a box of a row-major array of ``shape`` that starts at element ``start`` of a planned tensor."""
        assert values.dtype is tensor.dtype, f"{values.dtype} into {tensor.dtype}"
        assert tuple(values.shape) == box.shape
        flat = values.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy().data
        entry = self.plan.of_tensor[id(tensor)]
        done = 0
        for run_start, length in contiguous_runs(shape, box):
            num_bytes = length * tensor.dtype.itemsize
            self._write(entry, (start + run_start) * tensor.dtype.itemsize, flat[done : done + num_bytes])
            done += num_bytes

    def finish(self) -> None:
        """Write the headers with the checksums of the file's content, and flush the file to disk."""
        for entry in self.plan.entries:
            self._complete_checksum(entry)
            self._write_at(entry.header_start, memoryview(_local_header(entry)))
        self._write_at(self.plan.end, memoryview(_directory(self.plan.entries, self.plan.end)))
        os.fsync(self._descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def sync(self) -> None:
        """Flush this process's writes to disk."""
        os.fsync(self._descriptor)

    def _write(self, entry: _Entry, start: int, data: memoryview) -> None:
        if start == entry.summed_bytes:
            entry.checksum = zlib.crc32(data, entry.checksum)
            entry.summed_bytes += len(data)
        self._write_at(entry.data_start + start, data)

    def _write_at(self, position: int, data: memoryview) -> None:
        while data:
            written = os.pwrite(self._descriptor, data, position)
            position += written
            data = data[written:]

    def _complete_checksum(self, entry: _Entry) -> None:
        """Checksum the data that this process did not write sequentially, by reading it back."""
        while entry.summed_bytes < entry.num_bytes:
            wanted = min(_CHUNK_BYTES, entry.num_bytes - entry.summed_bytes)
            data = os.pread(self._descriptor, wanted, entry.data_start + entry.summed_bytes)
            if not data:
                raise OSError(f"{self.plan.path} is shorter than the data that was written")
            entry.checksum = zlib.crc32(data, entry.checksum)
            entry.summed_bytes += len(data)


def contiguous_runs(shape: Sequence[int], box: Box) -> Iterator[tuple[int, int]]:
    """Yield (start, length) of each contiguous run of a box in a row-major array, in the box's order."""
    dims = len(shape)
    outer = dims
    while outer > 0 and (outer == dims or box.shape[outer] == shape[outer]):
        outer -= 1
    if dims == 0:
        yield 0, 1
        return
    strides = [1] * dims
    for dim in reversed(range(dims - 1)):
        strides[dim] = strides[dim + 1] * shape[dim + 1]
    length = box.shape[outer] * strides[outer]
    base = sum(o * stride for o, stride in zip(box.offset, strides))
    for index in itertools.product(*(range(size) for size in box.shape[:outer])):
        yield base + sum(i * stride for i, stride in zip(index, strides)), length


def _place(stem: str, contents: Sequence[tuple[str, int, bytes | None]]) -> Iterator[_Entry]:
    position = 0
    for name, num_bytes, data in contents:
        full_name = f"{stem}/{name}"
        unpadded = position + _LOCAL_HEADER.size + len(full_name.encode()) + len(_sizes64(num_bytes)) + 4
        data_start = -(-unpadded // _ALIGNMENT) * _ALIGNMENT
        yield _Entry(full_name, num_bytes, position, data_start, data)
        position = data_start + num_bytes


def _sizes64(num_bytes: int) -> bytes:
    """Return the zip64 field of a local header; empty if the sizes fit in the header."""
    return struct.pack("<2H2Q", 1, 16, num_bytes, num_bytes) if num_bytes >= _LIMIT else b""


def _local_header(entry: _Entry) -> bytes:
    name, sizes = entry.name.encode(), _sizes64(entry.num_bytes)
    num_bytes = min(entry.num_bytes, _LIMIT)
    padding = entry.data_start - entry.header_start - _LOCAL_HEADER.size - len(name) - len(sizes) - 4
    extra = sizes + b"FB" + struct.pack("<H", padding) + b"Z" * padding
    header = _LOCAL_HEADER.pack(
        b"PK\x03\x04", _VERSION, _UTF8, 0, 0, _DATE_1980, entry.checksum, num_bytes, num_bytes, len(name), len(extra)
    )
    return header + name + extra


def _directory(entries: Sequence[_Entry], start: int) -> bytes:
    """Return the directory of a zip file and its end record."""
    parts = []
    for entry in entries:
        name, size, place = entry.name.encode(), entry.num_bytes, entry.header_start
        wide = [value for value in (size, size, place) if value >= _LIMIT]
        extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, place = min(size, _LIMIT), min(place, _LIMIT)
        parts.append(
            _DIRECTORY_HEADER.pack(
                *(b"PK\x01\x02", _VERSION, _VERSION, _UTF8, 0, 0, _DATE_1980, entry.checksum, size, size),
                *(len(name), len(extra), 0, 0, 0, 0, place),
            )
        )
        parts += [name, extra]
    directory = b"".join(parts)
    count, length = len(entries), len(directory)
    if count >= 0xFFFF or start + length >= _LIMIT:
        end64 = _END64.pack(b"PK\x06\x06", _END64.size - 12, _VERSION, _VERSION, 0, 0, count, count, length, start)
        directory += end64 + _END64_LOCATOR.pack(b"PK\x06\x07", 0, start + length, 1)
    count, length, start = min(count, 0xFFFF), min(length, _LIMIT), min(start, _LIMIT)
    return directory + _END.pack(b"PK\x05\x06", 0, 0, count, count, length, start, 0)
