"""Read, write and verify the ``.bin``/``.idx`` file pair of a tokenized data set.

`IndexedDataset` reads the pair, `IndexedDatasetBuilder` writes it. `write_index` writes the ``.idx`` file in pieces, so
that an index of any size takes little memory. `report_lost_pages` makes the process print an error if a file is
truncated while it is memory-mapped. Without the compiled handler, reading a lost page kills the process silently.

``PREFIX.checksums.json`` holds a CRC-32 of each block of ``.bin`` and ``.idx``::

    {"format": 1, "algorithm": "crc32",
     "bin": {"block_bytes": [1048576, 523], "crc32": ["90f599e3", "7355c460"]},
     "idx": {"block_bytes": [3242], "crc32": ["0a1b2c3d"]}}

The blocks of a file are contiguous and start at its first byte. Their sizes may differ. Opening a data set does
not read the checksums. ``tools/inspect_dataset.py --verify`` reads them.
"""

from __future__ import annotations

import functools
import hashlib
import json
import mmap
import os
import secrets
import struct
import time
import zlib
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.core.errors import DataError
from megatron.core.object_store import ObjectPath, ReadAheadFile, as_path, fetch, is_url, machine_cache
from megatron.core.safe_io import parse_json, read_plain_text

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
    return as_path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    return as_path(f"{prefix}.idx")


def _on_this_machine(path: Path) -> Path:
    """Return the path; for an object of an object store, the path of a local copy, downloaded once per node."""
    return fetch([path], machine_cache()) / path.name if isinstance(path, ObjectPath) else path


class IndexedDataset:
    """Random access to the sequences of a ``.bin``/``.idx`` pair without reading the files into memory.

    Opening checks the header and the sizes of both files in constant time. Every read is checked against the size
    of ``.bin``, so a damaged index raises a `DataError` and never returns unrelated memory. Instances can be
    pickled: the copy reopens the files. For a data set in an object store, ``.idx`` is downloaded once per node,
    and ``.bin`` is read with range requests.

    Attributes:
        sequence_lengths: int32 ``[num_sequences]``, in tokens.
        sequence_pointers: int64 ``[num_sequences]``, byte offsets into ``.bin``.
        document_indices: int64 ``[num_documents + 1]``, the sequence at which each document starts.
        sequence_modes: int8 ``[num_sequences]``, or None for a data set without modes.

    Raises:
        DataError: a file is missing, truncated or of another format, or the two files do not match.
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
                        f"{raw} is raw text, not a tokenized data set; pass --train-data {raw} (--valid-data, "
                        "--test-data), or tokenize it with tools/preprocess_data.py and pass PREFIX_text_document"
                    )
                if path.exists():
                    raise DataError(f"data file {path} is a folder, a pipe or a device; a file is expected")
                meant = self._find_data_set()
                if meant is not None:
                    raise DataError(f"data file {path} does not exist; did you mean {meant}?")
                raise DataError(
                    f"data file {path} does not exist; pass the data path without .bin or .idx, as in "
                    "my-corpus_text_document"
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
        """Return the raw text file that the prefix names, with or without its suffix; None if there is none."""
        if is_url(self.prefix):
            return None
        given = Path(self.prefix)
        named = [given, *(Path(f"{given}{suffix}") for suffix in _RAW_SUFFIXES)]
        return next((path for path in named if path.is_file() and path.suffix not in (".bin", ".idx")), None)

    def _find_data_set(self) -> str | None:
        """Return the data set that a file of it, or the --output-prefix of preprocessing, names; None without one."""
        if is_url(self.prefix):
            return None
        meant = (self.prefix.removesuffix(".bin").removesuffix(".idx"), f"{self.prefix}_text_document")
        return next((one for one in meant if idx_path(one).is_file() and bin_path(one).is_file()), None)

    def _read_index(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._index_status = os.fstat(file.fileno())
            size = self._index_status.st_size
            if size < INDEX_HEADER.size:
                raise DataError(
                    f"{path} is truncated: it has {size} bytes, but its header alone needs {INDEX_HEADER.size}; write "
                    "the data set again"
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
        """Check the last sequence and the last document against the file sizes."""
        needed = 0
        if len(self):
            needed = int(self.sequence_pointers[-1]) + int(self.sequence_lengths[-1]) * self.dtype.itemsize
        if needed != self._bin_bytes:
            verdict = "is truncated" if self._bin_bytes < needed else "does not belong to its .idx"
            raise DataError(
                f"{tokens_file} {verdict}: it has {self._bin_bytes} bytes, but its index describes {needed}; copy or "
                "write both files again"
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
        """Number of documents, each of one or more sequences."""
        return max(len(self.document_indices) - 1, 0)

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the whole data set."""
        return self._num_tokens

    def get(self, index: int, offset: int = 0, length: int | None = None) -> NDArray[Any]:
        """Return ``length`` tokens of a sequence, starting at ``offset`` (up to its end if ``length`` is None).

        The array is read-only: a view of the memory-mapped file, or a copy if the file is not mapped.

        Raises:
            DataError: the range is not inside the sequence, or the sequence is not inside the file.
        """
        if not 0 <= index < len(self.sequence_lengths):
            raise DataError(f"sequence {index} is out of range: {self.prefix} has {len(self)} sequences")
        available = self.sequence_lengths.item(index)
        count = available - offset if length is None else length
        begin = self.sequence_pointers.item(index) // self._token_bytes + offset
        end = begin + count
        if offset < 0 or count < 0 or offset + count > available or begin < 0 or end > self._num_tokens:
            raise DataError(
                f"tokens {offset} to {offset + count} of sequence {index} of {self.prefix} are out of range: the "
                f"sequence has {available} tokens at byte {self.sequence_pointers.item(index)} of {self._bin_bytes}"
            )
        if self._tokens is not None:
            # The rest of the last page would read as zeros. `report_lost_pages` handles later truncation.
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
        return DataError(
            f"{bin_path(self.prefix)} shrank below its {self._bin_bytes} bytes while it was in use; write it again"
        )

    def count_tokens(self, sequences: range) -> int:
        """Count the tokens of consecutive sequences from their start and end offsets.

        Raises:
            DataError: the offsets are not inside the file.
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
        """Identity of this ``.idx`` file and its current content, from its metadata.

        None for a file that has just changed, because another change within the resolution of the file system's
        timestamps would be missed.
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
        """Hash of the sequence lengths, the only part of the data set that sample indices depend on."""
        return hashlib.blake2b(self.sequence_lengths.data, digest_size=16).hexdigest()

    def verify_structure(self) -> None:
        """Check every length, pointer and document index, which reads the whole ``.idx``.

        Raises:
            DataError: a sequence or document is wrong; the message names the first one.
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
            raise DataError(f"{idx_path(self.prefix)} is damaged: its document indices do not increase from 0")


CHECKSUM_BLOCK_BYTES: Final = 1 << 20
_CHECKSUMS_FORMAT: Final = 1
_CHECKSUM_ALGORITHM: Final = "crc32"
Read = Callable[[int], None]
"""Callback that takes the number of bytes read since the last call."""


class Block(NamedTuple):
    """Size and CRC-32 of one block of a file."""

    num_bytes: int
    crc32: int


class Damage(NamedTuple):
    """Byte range of a file that differs from what was written."""

    path: Path
    start: int
    stop: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: bytes {self.start} to {self.stop}: {self.reason}"


def ignore_bytes_read(num_bytes: int) -> None:
    """Ignore the number of bytes read (the default progress callback)."""


def checksums_path(prefix: str | Path) -> Path:
    return Path(f"{prefix}.checksums.json")


def checksum_blocks(data: bytes | memoryview) -> list[Block]:
    """Split appended data into blocks with their checksums."""
    view = memoryview(data).cast("B")
    return [
        Block(len(part), zlib.crc32(part))
        for part in (view[i : i + CHECKSUM_BLOCK_BYTES] for i in range(0, len(view), CHECKSUM_BLOCK_BYTES))
    ]


def file_blocks(path: Path, read: Read = ignore_bytes_read) -> list[Block]:
    """Read a whole file and return its blocks with checksums."""
    blocks = []
    with open(path, "rb", buffering=0) as file:
        while data := file.read(CHECKSUM_BLOCK_BYTES):
            blocks.append(Block(len(data), zlib.crc32(data)))
            read(len(data))
    return blocks


def write_checksums(
    prefix: str | Path, bin_blocks: Sequence[Block] | None = None, read: Read = ignore_bytes_read
) -> None:
    """Write the checksum file of an existing data set atomically.

    Without ``bin_blocks``, the checksums of ``.bin`` are computed from the file.

    Raises:
        DataError: a file cannot be read or written.
    """
    target = checksums_path(prefix)
    # Always the same name, so that the next writer overwrites the temporary file of a killed one.
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        blocks = file_blocks(bin_path(prefix), read) if bin_blocks is None else bin_blocks
        content = {
            "format": _CHECKSUMS_FORMAT,
            "algorithm": _CHECKSUM_ALGORITHM,
            "bin": _blocks_to_json(blocks),
            "idx": _blocks_to_json(file_blocks(idx_path(prefix), read)),
        }
        try:
            with open(temporary, "w", encoding="ascii") as file:
                json.dump(content, file)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"the checksums of {prefix} cannot be written: {error}") from error


def verify_checksums(prefix: str | Path, read: Read = ignore_bytes_read) -> Iterator[Damage]:
    """Read both files of a data set completely and yield every block that differs from its checksum.

    Raises:
        DataError: the checksum file is missing or damaged, or a data file is missing.
    """
    stored = _read_checksums(checksums_path(prefix))
    for path, blocks in ((bin_path(prefix), stored["bin"]), (idx_path(prefix), stored["idx"])):
        try:
            yield from _damages(path, blocks, read)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def _damages(path: Path, blocks: Sequence[Block], read: Read) -> Iterator[Damage]:
    start = 0
    with open(path, "rb", buffering=0) as file:
        for num_bytes, crc32 in blocks:
            crc, left = 0, num_bytes
            while left and (data := file.read(min(left, CHECKSUM_BLOCK_BYTES))):
                crc = zlib.crc32(data, crc)
                left -= len(data)
                read(len(data))
            if left:
                expected = sum(block.num_bytes for block in blocks)
                found = start + num_bytes - left
                yield Damage(path, found, expected, f"missing: the file ends after {found} of {expected} bytes")
                return
            if crc != crc32:
                yield Damage(path, start, start + num_bytes, f"CRC-32 {crc:08x}, written as {crc32:08x}")
            start += num_bytes
        surplus = os.fstat(file.fileno()).st_size - start
        if surplus:
            yield Damage(path, start, start + surplus, f"{surplus} bytes too many")


def _blocks_to_json(blocks: Sequence[Block]) -> dict[str, list[Any]]:
    return {
        "block_bytes": [block.num_bytes for block in blocks],
        "crc32": [f"{block.crc32:08x}" for block in blocks],
    }


def _read_checksums(path: Path) -> dict[str, list[Block]]:
    try:
        content = parse_json(read_plain_text(path))
        if (content["format"], content["algorithm"]) != (_CHECKSUMS_FORMAT, _CHECKSUM_ALGORITHM):
            raise DataError(
                f"{path} has format {content['format']} with {content['algorithm']}; only format 1 with crc32 is "
                "supported"
            )
        return {name: _blocks_from_json(content[name]) for name in ("bin", "idx")}
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; without checksums only the structure can be verified") from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); write the checksums again") from error


def _blocks_from_json(entry: dict[str, list[Any]]) -> list[Block]:
    sizes, sums = entry["block_bytes"], entry["crc32"]
    if len(sizes) != len(sums) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("the numbers of sizes and checksums differ")
    return [Block(size, int(crc, 16)) for size, crc in zip(sizes, sums)]


PIECE_LENGTH: Final = 1 << 20

Pieces = Callable[[], Iterator[NDArray[Any]]]
"""Function that returns a new iterator over the pieces of an array."""


def write_index(
    path: Path, dtype: np.dtype[Any], sequence_lengths: Pieces, sequence_counts: Pieces, modes: Pieces | None = None
) -> None:
    """Write the index of a data set whose sequences are contiguous in ``.bin``, and sync it to disk.

    Args:
        sequence_lengths: number of tokens of each sequence, int32.
        sequence_counts: number of sequences of each document, integers.
        modes: mode of each sequence, int8, or None for a data set without modes.
    """
    (code,) = [code for code, known in DTYPE_CODES.items() if known == dtype]
    num_sequences = sum(map(len, sequence_lengths()))
    num_documents = sum(map(len, sequence_counts()))
    with open(path, "wb") as index:
        index.write(INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, code, num_sequences, num_documents + 1))
        for piece in sequence_lengths():
            index.write(piece.astype("<i4").tobytes())
        position = 0
        for piece in sequence_lengths():
            num_bytes = piece.astype("<i8") * dtype.itemsize
            ends = position + np.cumsum(num_bytes)
            index.write((ends - num_bytes).tobytes())
            position = int(ends[-1])
        index.write(np.zeros(1, "<i8").tobytes())
        sequence = 0
        for piece in sequence_counts():
            ends = sequence + np.cumsum(piece.astype("<i8"))
            index.write(ends.tobytes())
            sequence = int(ends[-1])
        for piece in modes() if modes is not None else ():
            index.write(piece.astype("<i1").tobytes())
        index.flush()
        os.fsync(index.fileno())


def replace_tokens(prefix: str | Path, tokens: Path) -> None:
    """Rename a file of tokens to the ``.bin`` of a data set. The caller must then write the ``.idx``.

    The old index and checksums are removed first, because they do not match the new ``.bin``.
    """
    idx_path(prefix).unlink(missing_ok=True)
    checksums_path(prefix).unlink(missing_ok=True)
    os.replace(tokens, bin_path(prefix))


def cut(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield non-empty pieces of an array, of `PIECE_LENGTH` elements at most."""
    for begin in range(0, len(values), PIECE_LENGTH):
        yield values[begin : begin + PIECE_LENGTH]


class IndexedDatasetBuilder:
    """Writer of data sets that `IndexedDataset` and Megatron-LM read.

    Both files are written under temporary names in the target folder. `finalize` renames them, ``.idx`` last, so that
    a killed writer never leaves an incomplete data set. As a context manager, it removes its temporary files if
    `finalize` was not reached.

    Raises:
        DataError: the dtype has no code in the file format, or the folder cannot be written.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | type[np.generic] | str, modes: bool = False) -> None:
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in DTYPE_CODES.values():
            raise DataError(
                f"dtype {self.dtype} cannot be stored in {self.prefix}; use one of "
                f"{', '.join(str(known) for known in DTYPE_CODES.values())}"
            )
        self._lengths = array("i")
        self._document_indices = array("q", [0])
        self._modes = array("b") if modes else None
        suffix = f"tmp-{secrets.token_hex(6)}"
        self._temporary_bin = Path(f"{self.prefix}.bin.{suffix}")
        self._temporary_idx = Path(f"{self.prefix}.idx.{suffix}")
        try:
            self._file = open(self._temporary_bin, "xb", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise DataError(f"data set {self.prefix} cannot be written: {error}") from error

    def __enter__(self) -> IndexedDatasetBuilder:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.discard()

    @property
    def num_documents(self) -> int:
        """Number of documents added so far."""
        return len(self._document_indices) - 1

    def add_document(
        self,
        tokens: NDArray[Any] | Sequence[int],
        lengths: Sequence[int] | None = None,
        modes: Sequence[int] = (),
    ) -> None:
        """Append a document that consists of sequences of ``lengths`` tokens, or of one sequence if it is None.

        Raises:
            DataError: the lengths do not sum to the number of tokens, or a token does not fit the dtype.
        """
        values = np.asarray(tokens)
        lengths = [len(values)] if lengths is None else lengths
        if sum(lengths) != len(values) or min(lengths, default=0) < 0:
            raise DataError(
                f"{self.prefix}: the sequence lengths sum to {sum(lengths)}, but the document has {len(values)} tokens"
            )
        if self._modes is not None and len(modes) != len(lengths):
            raise DataError(f"{self.prefix}: {len(modes)} modes for {len(lengths)} sequences")
        self._file.write(self._to_dtype(values).tobytes())
        self._lengths.extend(lengths)
        self._document_indices.append(len(self._lengths))
        if self._modes is not None:
            self._modes.extend(modes)

    def _to_dtype(self, values: NDArray[Any]) -> NDArray[Any]:
        if len(values) and self.dtype.kind in "iu" and values.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            low, high = int(values.min()), int(values.max())
            if low < limits.min or high > limits.max:
                raise DataError(
                    f"{self.prefix}: token {high if high > limits.max else low} does not fit in {self.dtype.name} "
                    f"({limits.min} to {limits.max}); pass the tokenizer's true vocabulary size"
                )
        return values.astype(self.dtype, copy=False)

    def finalize(self) -> None:
        """Write the index and rename both files to their final names.

        Raises:
            DataError: the files cannot be written, for example because the disk is full.
        """
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._write_index()
            replace_tokens(self.prefix, self._temporary_bin)
            os.replace(self._temporary_idx, idx_path(self.prefix))
        except OSError as error:
            raise DataError(f"data set {self.prefix} cannot be written: {error}") from error

    def _write_index(self) -> None:
        lengths = np.frombuffer(self._lengths, np.int32)
        counts = np.diff(np.frombuffer(self._document_indices, np.int64))
        modes = None if self._modes is None else partial(cut, np.frombuffer(self._modes, np.int8))
        write_index(self._temporary_idx, self.dtype, partial(cut, lengths), partial(cut, counts), modes)

    def discard(self) -> None:
        """Close and remove the temporary files. Does nothing after `finalize`."""
        self._file.close()
        self._temporary_bin.unlink(missing_ok=True)
        self._temporary_idx.unlink(missing_ok=True)


def report_lost_pages(rank: int) -> bool:
    """Install a SIGBUS handler that names the truncated memory-mapped file and exits with status 2.

    Returns whether the compiled extension is available. Without it, SIGBUS kills the process silently.
    """
    try:
        from megatron.core.datasets import _bus_error
    except ImportError:
        return False
    _bus_error.install("error: " if rank == 0 else f"error: rank {rank}: ")
    return True
