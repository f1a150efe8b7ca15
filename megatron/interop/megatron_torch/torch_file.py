"""A file that torch.save wrote, opened without running it: its value at once, its tensors when they are asked for."""

from __future__ import annotations

import io
import mmap
import os
import struct
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch

from megatron.core.errors import CheckpointError, DamagedCheckpointError
from megatron.interop.megatron_torch.pickle_reader import read_pickle, storage_dtype
from megatron.interop.megatron_torch.stored_values import LazyTensor, StorageKey

_LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
_LEGACY_VERSION = 1001
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_CHECK_CHUNK_BYTES = 16 * 1024 * 1024
_NOT_THE_FORMAT = (
    *(zipfile.BadZipFile, struct.error, ValueError, EOFError, LookupError, RuntimeError, TypeError, AttributeError),
    *(ArithmeticError, AssertionError),
)
_HAS_MADVISE = hasattr(mmap.mmap, "madvise")  # not on Windows


@dataclass(frozen=True)
class StoragePlace:
    """Locate a storage's bytes in a file. ``checksum`` is the CRC-32 that the file gives, where it does."""

    start: int
    num_bytes: int
    checksum: int | None = None


class TorchFile:
    """Hold an open file of torch's zip format, or of the one before it: ``value`` is what was saved.

    Tensors in ``value`` are `LazyTensor`; `view` maps their bytes, so that only the pages that are looked at are read.
    With a ``section`` (first byte, number of bytes) that part of the file is read as a file of the zip format.

    Raises:
        DamagedCheckpointError: the file is missing, cut short or no such file.
        CheckpointError: it asks for something that is not data.
    """

    def __init__(self, path: Path, section: tuple[int, int] | None = None) -> None:
        self.path = path
        self._section = section
        self.places: dict[str, StoragePlace] = {}
        self._map: mmap.mmap | None = None
        try:
            with open(path, "rb") as file:
                self.value = self._read(file)
        except OSError as error:
            raise DamagedCheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from error
        except _NOT_THE_FORMAT as error:
            raise DamagedCheckpointError(f"{path}: not a whole file of torch's format ({error})") from error

    def close(self) -> None:
        """Close the file; views of it must not be used any more."""
        self._map = None

    def view(self, tensor: LazyTensor) -> torch.Tensor:
        """Return a tensor whose memory is the file's.

        Raises:
            DamagedCheckpointError: the file has no such storage, or ends before it does.
        """
        place = self.places.get(tensor.storage.key)
        itemsize = tensor.dtype.itemsize
        if place is None or place.num_bytes < tensor.storage.num_elements * itemsize:
            raise DamagedCheckpointError(f"{self.path}: the values of storage {tensor.storage.key} are missing")
        if tensor.num_elements == 0:
            return torch.empty(tensor.shape, dtype=tensor.dtype)
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides))
        if tensor.offset + reach > place.num_bytes // itemsize:
            raise DamagedCheckpointError(f"{self.path}: a tensor reaches beyond storage {tensor.storage.key}")
        flat = torch.frombuffer(
            self._mapped(), dtype=tensor.dtype, count=reach, offset=place.start + tensor.offset * itemsize
        )
        return flat.as_strided(tensor.shape, tensor.strides)

    def with_tensors(self, value: Any) -> Any:
        """Return a value of the file with its tensors read into memory; for small ones."""
        if isinstance(value, LazyTensor):
            return self.view(value).clone()
        if isinstance(value, Mapping):
            return {key: self.with_tensors(item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.with_tensors(item) for item in value)
        return value

    def release_pages(self) -> None:
        """Give back the memory of the pages that were looked at; views stay good and are read again when used."""
        if self._map is not None and _HAS_MADVISE:
            self._map.madvise(mmap.MADV_DONTNEED)

    def check_storage(self, key: str) -> None:
        """Compare a storage's bytes with the checksum beside them, where the format has one.

        Raises:
            DamagedCheckpointError: they differ, or the file has no such storage.
        """
        place = self.places.get(key)
        if place is None:
            raise DamagedCheckpointError(f"{self.path}: the values of storage {key} are missing")
        if place.checksum is None:
            return
        found = 0
        mapped = memoryview(self._mapped())
        for start in range(place.start, place.start + place.num_bytes, _CHECK_CHUNK_BYTES):
            found = zlib.crc32(mapped[start : min(start + _CHECK_CHUNK_BYTES, place.start + place.num_bytes)], found)
            self.release_pages()
        if found != place.checksum:
            raise DamagedCheckpointError(f"{self.path}: the bytes of storage {key} do not match their checksum")

    def _mapped(self) -> mmap.mmap:
        if self._map is None:
            with open(self.path, "rb") as file:
                # Private, not shared: torch takes no read-only memory, and nothing is ever written through it.
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._map

    def _read(self, file: BinaryIO) -> Any:
        if self._section is not None:
            return self._read_zip(FileSection(file, *self._section), self._section[0])
        if file.read(4) == b"PK\x03\x04":
            return self._read_zip(file)
        # Mapped, so that a length which the file claims is not more than the file has.
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            return self._read_legacy(mapped)

    def _read_zip(self, file: BinaryIO | FileSection, first_byte: int = 0) -> Any:
        size = file.seek(0, os.SEEK_END)
        with zipfile.ZipFile(cast(BinaryIO, file)) as archive:
            entries = {entry.filename.partition("/")[2]: entry for entry in archive.infolist()}
            if "data.pkl" not in entries:
                raise ValueError("it holds no data.pkl")
            for name, entry in entries.items():
                if entry.compress_type != zipfile.ZIP_STORED:
                    raise ValueError(f"{name} is compressed")
                if entry.compress_size != entry.file_size:
                    raise ValueError(f"{name} has {entry.file_size} bytes, and {entry.compress_size} are stored")
                if entry.header_offset + entry.file_size > size:
                    raise ValueError(f"it ends within {name}")
            if "byteorder" in entries and archive.read(entries["byteorder"]) != b"little":
                raise CheckpointError(f"{self.path}: written on a big-endian machine, which is not supported")
            for name, entry in entries.items():
                if name.startswith("data/"):
                    start = _data_start(file, entry)
                    if start + entry.file_size > size:
                        raise ValueError(f"it ends within {name}")
                    place = StoragePlace(first_byte + start, entry.file_size, entry.CRC)
                    self.places[name.removeprefix("data/")] = place
            return read_pickle(archive.read(entries["data.pkl"]), self.path, self._storage)

    def _storage(self, description: Any) -> StorageKey:
        """Return what a file says of a storage: (tag, kind, key, device, number of elements)."""
        tag, kind, key, _, num_elements = description
        if tag != "storage" or not isinstance(key, (str, int)) or not _is_count(num_elements):
            raise ValueError("a persistent object that is no storage")
        return StorageKey(str(key), storage_dtype(kind, self.path), num_elements)

    def _read_legacy(self, file: mmap.mmap) -> Any:
        """Read the format of torch before 1.6: pickles in a row, then the storages in the order of a list of keys."""

        def nothing_stored(description: Any) -> StorageKey:
            raise ValueError("a storage in the header")

        if read_pickle(file, self.path, nothing_stored) != _LEGACY_MAGIC:
            raise ValueError("it begins with another number")
        if read_pickle(file, self.path, nothing_stored) != _LEGACY_VERSION:
            raise ValueError("it is of another version")
        system = read_pickle(file, self.path, nothing_stored)
        if not system.get("little_endian", False):
            raise CheckpointError(f"{self.path}: written on a big-endian machine, which is not supported")
        dtypes: dict[str, torch.dtype] = {}

        def stored(description: Any) -> StorageKey:
            *whole, view = description
            storage = self._storage(whole)
            dtypes.setdefault(storage.key, storage.dtype)
            if view is None:
                return storage
            _, start, length = view
            if not _is_count(start) or not _is_count(length):
                raise ValueError("a storage without a size")
            return StorageKey(storage.key, dtypes[storage.key], start + length, start)

        value = read_pickle(file, self.path, stored)
        for key in read_pickle(file, self.path, nothing_stored):
            num_bytes = int.from_bytes(file.read(8), "little") * dtypes[key].itemsize
            if file.tell() + num_bytes > len(file):
                raise ValueError(f"it ends within storage {key}")
            self.places[key] = StoragePlace(file.tell(), num_bytes)
            file.seek(num_bytes, os.SEEK_CUR)
        return value


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < 2**63


class FileSection(io.RawIOBase):
    """Read a part of an open file as if it were a file.

    Raises:
        ValueError: the file ends within the part.
    """

    def __init__(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        super().__init__()
        self._file, self._start, self._num_bytes, self._position = file, start, num_bytes, 0
        size = os.fstat(file.fileno()).st_size
        if start < 0 or num_bytes < 0 or start + num_bytes > size:
            raise ValueError(f"it has {size} bytes, and {num_bytes} at {start} are asked for")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte of the part and return which."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no byte {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the byte of the part that is read next."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; fewer at the end of the part."""
        rest = max(self._num_bytes - self._position, 0)
        self._file.seek(self._start + self._position)
        data = self._file.read(rest if size is None or size < 0 else min(size, rest))
        self._position += len(data)
        return data


def _data_start(file: BinaryIO | FileSection, entry: zipfile.ZipInfo) -> int:
    """Return where an entry's data begins; the local header's extra field is not the directory's."""
    file.seek(entry.header_offset)
    header = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
    return entry.header_offset + _LOCAL_HEADER.size + int(header[-2]) + int(header[-1])
