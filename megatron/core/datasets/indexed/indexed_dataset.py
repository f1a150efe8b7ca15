"""Read the ``.bin``/``.idx`` pair that holds a tokenized data set."""

from __future__ import annotations

import functools
import hashlib
import mmap
import os
import struct
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.errors import DataError
from megatron.core.object_store import ObjectPath, ReadAheadFile, as_path, fetch, is_url, machine_cache

INDEX_MAGIC: Final = b"MMIDIDX\x00\x00"
INDEX_VERSION: Final = 1
INDEX_HEADER: Final = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of document indices."""

DTYPE_CODES: Final[Mapping[int, np.dtype[Any]]] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<f4"),
    8: np.dtype("<u2"),
}


_SETTLED_AFTER_NS: Final = 2_000_000_000
_RAW_SUFFIXES: Final = (".jsonl", ".json", ".txt", ".parquet")


def optimal_dtype(vocab_size: int | None) -> np.dtype[Any]:
    """Return the token dtype that the file format uses for a vocabulary: u16 below 65,500 ids, else i32."""
    return np.dtype("<u2") if vocab_size is not None and vocab_size < 65500 else np.dtype("<i4")


def bin_path(prefix: str | Path) -> Path:
    """Return the path of the tokens of a data set."""
    return as_path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """Return the path of the index of a data set."""
    return as_path(f"{prefix}.idx")


def _on_this_machine(path: Path) -> Path:
    """Return the path itself, or for an object that of a copy, which is fetched once on each machine."""
    return fetch([path], machine_cache()) / path.name if isinstance(path, ObjectPath) else path


class IndexedDataset:
    """Give random access to the sequences of a ``.bin``/``.idx`` pair without reading the files into memory.

    Opening checks the header and the sizes of both files in constant time; every read is checked against the size
    of ``.bin``, so a damaged index gives a `DataError`, never data from elsewhere in memory. Instances can be
    pickled: the copy opens the files again. Of a data set in an object store ``.idx`` is copied to this machine once,
    and ``.bin`` read by ranges.

    Attributes:
        sequence_lengths: int32 ``[num_sequences]``, in tokens.
        sequence_pointers: int64 ``[num_sequences]``, byte offsets into ``.bin``.
        document_indices: int64 ``[num_documents + 1]``, the sequence at which each document starts.
        sequence_modes: int8 ``[num_sequences]``, or None for a data set without modes.

    Raises:
        DataError: a file is missing, truncated, of another format, or does not fit the other.
    """

    def __init__(self, prefix: str | Path, mmap_bin_files: bool = True) -> None:
        self.prefix = str(prefix)
        self.mmap_bin_files = mmap_bin_files
        self._open()

    def _open(self) -> None:
        index_file, tokens_file = idx_path(self.prefix), bin_path(self.prefix)
        for path in (index_file, tokens_file):
            if not path.is_file():
                raw = self._find_raw_text()
                if raw is not None:
                    raise DataError(
                        f"{raw} is raw text, not a tokenized data set; tokenize it first: python "
                        f"tools/preprocess_data.py --input {raw} --output-prefix {raw.stem} --append-eod with the "
                        f"tokenizer's flags, then give {raw.stem}_text_document"
                    )
                if path.exists():
                    raise DataError(f"data file {path} is a folder, a pipe or a device, and not a file")
                raise DataError(
                    f"data file {path} does not exist; a data path is given without .bin or .idx, "
                    "as in my-corpus_text_document"
                )
        try:
            self._read_index(_on_this_machine(index_file))
            self._bin_bytes = tokens_file.stat().st_size
            self._check_sizes(tokens_file)
            self._token_bytes = self.dtype.itemsize
            self._num_tokens = self._bin_bytes // self._token_bytes
            self._remote = ReadAheadFile(tokens_file) if isinstance(tokens_file, ObjectPath) else None
            is_mapped = self.mmap_bin_files and self._remote is None
            self._map = self._map_file(tokens_file) if is_mapped and self._bin_bytes else None
            self._tokens = self._view_tokens() if is_mapped else None
            is_read = self._remote is None and not is_mapped
            self._file = open(tokens_file, "rb", buffering=0) if is_read else None  # noqa: SIM115
        except OSError as error:
            raise DataError(f"data set {self.prefix} cannot be read: {error}") from error

    def _find_raw_text(self) -> Path | None:
        """Return what was given instead of a data set, itself or without its suffix."""
        if is_url(self.prefix):
            return None
        given = Path(self.prefix)
        named = [given, *(Path(f"{given}{suffix}") for suffix in _RAW_SUFFIXES)]
        return next((path for path in named if path.is_file() and path.suffix not in (".bin", ".idx")), None)

    def _read_index(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._index_status = os.fstat(file.fileno())
            size = self._index_status.st_size
            if size < INDEX_HEADER.size:
                raise DataError(
                    f"{path} is truncated: {size} bytes, its header alone has {INDEX_HEADER.size}; write the data set "
                    "again"
                )
            buffer = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        magic, version, code, num_sequences, num_indices = INDEX_HEADER.unpack_from(buffer)
        if magic != INDEX_MAGIC:
            raise DataError(f"{path} is not an index file: it starts with {magic!r}, not with {INDEX_MAGIC!r}")
        if version != INDEX_VERSION:
            raise DataError(f"{path} has format version {version}; only version {INDEX_VERSION} can be read")
        if code not in DTYPE_CODES:
            raise DataError(f"{path} has dtype code {code}; known codes are {', '.join(map(str, DTYPE_CODES))}")
        without_modes = INDEX_HEADER.size + 12 * num_sequences + 8 * num_indices
        if size not in (without_modes, without_modes + num_sequences):
            raise DataError(
                f"{path} has {size} bytes, but {num_sequences} sequences and {num_indices} document indices need "
                f"{without_modes} (or {without_modes + num_sequences} with modes); it is truncated or damaged: "
                "write the data set again"
            )
        self.dtype = DTYPE_CODES[code]
        offset = INDEX_HEADER.size
        self.sequence_lengths: NDArray[np.int32] = np.frombuffer(buffer, "<i4", num_sequences, offset)
        offset += 4 * num_sequences
        self.sequence_pointers: NDArray[np.int64] = np.frombuffer(buffer, "<i8", num_sequences, offset)
        offset += 8 * num_sequences
        self.document_indices: NDArray[np.int64] = np.frombuffer(buffer, "<i8", num_indices, offset)
        offset += 8 * num_indices
        self.sequence_modes: NDArray[np.int8] | None = (
            np.frombuffer(buffer, "<i1", num_sequences, offset) if size > without_modes else None
        )

    def _check_sizes(self, tokens_file: Path) -> None:
        """Compare the last sequence and the last document with the file sizes."""
        needed = 0
        if len(self):
            needed = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if needed != self._bin_bytes:
            verdict = "is truncated" if self._bin_bytes < needed else "does not belong to its .idx"
            raise DataError(
                f"{tokens_file} {verdict}: it has {self._bin_bytes} bytes, its index describes {needed}; "
                "copy or write both files again"
            )
        if len(self.document_indices) and int(self.document_indices[-1]) != len(self):
            raise DataError(
                f"{idx_path(self.prefix)} is damaged: its documents end at sequence {int(self.document_indices[-1])}, "
                f"but it has {len(self)} sequences; write the data set again"
            )

    def _map_file(self, path: Path) -> mmap.mmap:
        with open(path, "rb") as file:
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def _view_tokens(self) -> NDArray[Any]:
        if self._map is None:
            return np.empty(0, self.dtype)  # an empty file cannot be mapped
        return np.frombuffer(self._map, self.dtype, self._bin_bytes // self.dtype.itemsize)

    def __len__(self) -> int:
        return len(self.sequence_lengths)

    def __getitem__(self, index: int) -> NDArray[Any]:
        return self.get(index)

    def __getstate__(self) -> dict[str, Any]:
        return {"prefix": self.prefix, "mmap_bin_files": self.mmap_bin_files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.prefix, self.mmap_bin_files = state["prefix"], state["mmap_bin_files"]
        self._open()

    @property
    def num_documents(self) -> int:
        """Count the documents; each has one sequence or more."""
        return max(len(self.document_indices) - 1, 0)

    @property
    def num_tokens(self) -> int:
        """Count the tokens of the whole data set."""
        return self._num_tokens

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return ``length`` tokens of a sequence from token ``offset`` on (to its end without ``length``).

        The array is read-only: a view of the mapped file, or a copy where the file is not mapped.

        Raises:
            DataError: the range is not inside the sequence, or the sequence not inside the file.
        """
        if not 0 <= index < len(self.sequence_lengths):
            raise DataError(f"sequence {index} is not in {self.prefix}, which has {len(self)}")
        available = self.sequence_lengths.item(index)
        count = available - offset if length is None else length
        begin = self.sequence_pointers.item(index) // self._token_bytes + offset
        end = begin + count
        if offset < 0 or count < 0 or offset + count > available or begin < 0 or end > self._num_tokens:
            raise DataError(
                f"tokens {offset} to {offset + count} of sequence {index} are not in {self.prefix}: the sequence has "
                f"{available} tokens at byte {self.sequence_pointers.item(index)} of {self._bin_bytes}"
            )
        if self._tokens is not None:
            # The rest of the last page would be read as zeros. Pages that go after this look are `lost_pages`' matter.
            if self._map is not None and self._map.size() < self._bin_bytes:
                raise self._became_shorter()
            return self._tokens[begin:end]
        if self._remote is not None:
            raw = self._remote.read(begin * self._token_bytes, count * self._token_bytes)
        else:
            assert self._file is not None
            raw = os.pread(self._file.fileno(), count * self._token_bytes, begin * self._token_bytes)
        if len(raw) != count * self._token_bytes:
            raise self._became_shorter()
        return np.frombuffer(raw, self.dtype)

    def _became_shorter(self) -> DataError:
        return DataError(f"{bin_path(self.prefix)} became shorter than the {self._bin_bytes} bytes that it had")

    def count_tokens(self, sequences: range) -> int:
        """Count the tokens of some sequences, from where they start and end.

        Raises:
            DataError: they do not start and end inside the file.
        """
        begin, end = (
            self.sequence_pointers.item(place) if place < len(self) else self._bin_bytes
            for place in (sequences.start, max(sequences.start, sequences.stop))
        )
        if not 0 <= begin <= end <= self._bin_bytes:
            raise DataError(
                f"{idx_path(self.prefix)} is damaged: sequences {sequences.start} to {sequences.stop} are at bytes "
                f"{begin} to {end} of {self._bin_bytes}; write the data set again"
            )
        return (end - begin) // self.dtype.itemsize

    @property
    def index_identity(self) -> dict[str, str | int] | None:
        """Identify this ``.idx`` file and its present content.

        None for a file that changed a moment ago: it may change again within the tick of the file system's clock.
        """
        status = self._index_status
        if time.time_ns() - max(status.st_mtime_ns, status.st_ctime_ns) < _SETTLED_AFTER_NS:
            return None
        return {
            "path": str(idx_path(self.prefix).resolve()),
            "device": status.st_dev,
            "inode": status.st_ino,
            "size": status.st_size,
            "modified_ns": status.st_mtime_ns,
            "changed_ns": status.st_ctime_ns,
        }

    @functools.cached_property
    def lengths_fingerprint(self) -> str:
        """Hash the sequence lengths: all of this data set that any sample index depends on."""
        return hashlib.blake2b(self.sequence_lengths.data, digest_size=16).hexdigest()

    def verify_structure(self) -> None:
        """Check every length, pointer and document index, which reads the whole ``.idx``.

        Raises:
            DataError: naming the first sequence or document that is wrong.
        """
        lengths = self.sequence_lengths.astype(np.int64)
        ends = np.cumsum(lengths * self.dtype.itemsize)
        wrong = np.flatnonzero((lengths < 0) | (self.sequence_pointers != ends - lengths * self.dtype.itemsize))
        if len(wrong):
            first = int(wrong[0])
            raise DataError(
                f"{idx_path(self.prefix)} is damaged at sequence {first}: length {int(lengths[first])}, byte "
                f"{int(self.sequence_pointers[first])}; write the data set again"
            )
        if len(self.document_indices) and (self.document_indices[0] != 0 or np.any(np.diff(self.document_indices) < 0)):
            raise DataError(f"{idx_path(self.prefix)} is damaged: its document indices do not rise from 0")
