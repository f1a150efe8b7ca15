"""The folder of unfinished preprocessing, ``PREFIX.preprocessing``, which collects the data sets chunk by chunk.

``manifest.jsonl`` has one line that describes the work, then one line for each finished chunk. Each stream (a key, or
a partition of a key) has the files of `stream_paths`. A chunk is finished once its line is in the manifest, so a
process that is killed at any point leaves a folder from which the work can resume. On resume, the lines are verified
against the files.

``PREFIX.preprocessing.json`` records the finished work: the description of the command, and its output.
"""

from __future__ import annotations

import errno
import fcntl
import json
import mmap
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets import (
    PIECE_LENGTH,
    Block,
    bin_path,
    checksum_blocks,
    idx_path,
    replace_tokens,
    write_checksums,
    write_index,
)
from megatron.core.errors import DataError
from megatron.data.input_chunks import Chunk

ALIGNMENT: Final = 4096
"""Alignment of the offset and the size of direct I/O, in bytes."""

_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)  # Linux only
_BUFFER_BYTES: Final = 2 << 20


def aligned_buffer() -> NDArray[np.uint8]:
    """Allocate a page-aligned buffer for direct I/O, which the files of one thread can share."""
    return np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8)


class PlacedFile:
    """Writer of parts of an existing file. With a ``buffer``, it uses direct I/O if possible.

    The page cache would make another copy that is never read, and allocating its memory can take several times as long
    as the disk. Whole pages of the file are written directly from the buffer. Partial pages at both ends of a part are
    written through the page cache, because other parts share these pages.
    """

    def __init__(self, path: Path, buffer: NDArray[np.uint8] | None = None) -> None:
        self._buffer = np.empty(0, np.uint8) if buffer is None else buffer
        self._cached = os.open(path, os.O_WRONLY)
        self._direct = None if buffer is None else _open_direct(path)

    def write(self, data: memoryview, offset: int) -> None:
        """Write a part at an offset.

        Raises:
            OSError: the part cannot be written.
        """
        to_page = -offset % ALIGNMENT
        num_direct = (len(data) - to_page) // ALIGNMENT * ALIGNMENT
        if self._direct is None or num_direct <= 0:
            return _write_all_at(self._cached, data, offset)
        _write_all_at(self._cached, data[:to_page], offset)
        begin, end = to_page, to_page + num_direct
        while begin < end and self._direct is not None:
            piece = self._buffer[: min(end - begin, len(self._buffer))]
            # NumPy releases the GIL while it copies.
            np.copyto(piece, np.frombuffer(data[begin : begin + len(piece)], np.uint8))
            begin += self._write_directly(self._direct, piece.data, offset + begin)
        return _write_all_at(self._cached, data[begin:], offset + begin)

    def _write_directly(self, descriptor: int, piece: memoryview, offset: int) -> int:
        """Write directly and return the bytes written; 0 if the file system or offset does not support direct I/O."""
        try:
            written = os.pwrite(descriptor, piece, offset)
        except OSError as failure:
            if failure.errno != errno.EINVAL:
                raise
            written = 0
        if written % ALIGNMENT or not written:
            os.close(descriptor)
            self._direct = None
        return written

    def close(self) -> None:
        """Close the file."""
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)


def _open_direct(path: Path) -> int | None:
    if not _DIRECT:
        return None
    try:
        return os.open(path, os.O_WRONLY | _DIRECT)
    except OSError as failure:
        if failure.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return None


def _write_all_at(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


FORMAT: Final = 2
COMPLETE: Final = b'{"complete": true}\n'
"""Last line of the manifest, after which only publishing the files is left."""


@dataclass(frozen=True)
class StreamTally:
    """Sizes and checksums of the tokens, lengths and counts that a chunk adds to one stream."""

    num_bytes: tuple[int, int, int]
    token_blocks: list[Block]
    lengths_crc32: int
    counts_crc32: int

    @classmethod
    def of(cls, tokens: bytes | memoryview, lengths: bytes, counts: bytes) -> StreamTally:
        """Compute the sizes and checksums of the added parts."""
        num_bytes = (len(tokens), len(lengths), len(counts))
        return cls(num_bytes, checksum_blocks(tokens), zlib.crc32(lengths), zlib.crc32(counts))


@dataclass(frozen=True)
class Entry:
    """Record of a chunk that was written after all earlier chunks.

    Attributes:
        streams: index and tally of each stream.
        num_skipped: lines that ``--on-error skip`` skipped.
    """

    chunk: Chunk
    num_lines: int
    num_documents: int
    num_skipped: int
    streams: list[tuple[int, StreamTally]]

    def to_json(self) -> dict[str, Any]:
        """Return the entry as the JSON object of a manifest line."""
        chunk = self.chunk
        return {
            "chunk": chunk.number,
            "file": chunk.file,
            "begin": chunk.begin,
            "bytes": chunk.num_bytes,
            "source_bytes": chunk.source_bytes,
            "input_crc32": chunk.crc32,
            "lines": self.num_lines,
            "documents": self.num_documents,
            "skipped": self.num_skipped,
            "streams": [
                {
                    "stream": stream,
                    "bytes": list(tally.num_bytes),
                    "tokens": [list(block) for block in tally.token_blocks],
                    "lengths_crc32": tally.lengths_crc32,
                    "counts_crc32": tally.counts_crc32,
                }
                for stream, tally in self.streams
            ],
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Entry:
        """Read the JSON object of a manifest line.

        Raises:
            KeyError, TypeError, ValueError: the object is not a valid entry.
        """
        chunk = Chunk(
            line["chunk"],
            line["file"],
            line["begin"],
            line["bytes"],
            crc32=line["input_crc32"],
            source_bytes=line["source_bytes"],
        )
        streams = []
        for item in line["streams"]:
            tokens, lengths, counts = item["bytes"]
            blocks = [Block(*block) for block in item["tokens"]]
            tally = StreamTally((tokens, lengths, counts), blocks, item["lengths_crc32"], item["counts_crc32"])
            streams.append((item["stream"], tally))
        return cls(chunk, line["lines"], line["documents"], line["skipped"], streams)


def read_description(path: Path) -> dict[str, Any] | None:
    """Return the description of the work, or None if there is no valid one."""
    try:
        with open(path, "rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return None
    description = _object(line) if line.endswith(b"\n") else None
    return description if description is not None and description.get("format") == FORMAT else None


def ends_complete(path: Path) -> bool:
    """Return whether the manifest ends with the line `COMPLETE`."""
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - len(COMPLETE) - 1))
        return file.read().endswith(b"\n" + COMPLETE)


def read_entries(path: Path) -> Iterator[tuple[int, Entry]]:
    """Yield the end offset and the entry of each manifest line, up to the first incomplete line."""
    with open(path, "rb") as file:
        position = len(file.readline())
        for number, line in enumerate(file):
            position += len(line)
            content = _object(line) if line.endswith(b"\n") else None
            if content is None or content.get("chunk") != number:
                return
            yield position, Entry.from_json(content)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None


def write_record(path: Path, folder: Path, description: dict[str, Any], prefixes: Sequence[str]) -> None:
    """Write the record of complete data sets atomically, with a temporary file in ``folder``.

    Raises:
        OSError: the record cannot be written.
    """
    unfinished = folder / "record.json"
    unfinished.write_text(json.dumps({"description": description, "bytes": _sizes(prefixes)}) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def differences(path: Path, description: dict[str, Any], prefixes: Sequence[str]) -> list[str] | None:
    """Name the settings in which a command differs from the one that wrote the data sets; None if that is unknown."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, Any] = record["description"]
        if record["bytes"] != _sizes(prefixes):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sorted(name for name in {*found, *description} if found.get(name) != description.get(name))


def _sizes(prefixes: Sequence[str]) -> dict[str, list[int]]:
    """Return the sizes of the files of each data set, by its name."""
    return {Path(prefix).name: [make(prefix).stat().st_size for make in (bin_path, idx_path)] for prefix in prefixes}


PARTS: Final = ("tokens", "lengths", "counts")
"""The files of a stream. Each is an array to which every chunk appends a part."""

_LOCK_WAIT_S: Final = 10.0
_READ_BYTES: Final = 1 << 20
_WRITE_BACK_BYTES: Final = 16 << 20


def stream_paths(folder: Path, stream: int) -> tuple[Path, Path, Path]:
    """Return the files of a stream, in the order of `PARTS`."""
    tokens, lengths, counts = (folder / f"{stream}.{part}" for part in PARTS)
    return tokens, lengths, counts


def unfinished_path(prefix: str) -> Path:
    return Path(f"{prefix}.preprocessing")


def record_path(prefix: str) -> Path:
    return Path(f"{prefix}.preprocessing.json")


class WorkFolder:
    """The locked work folder, positioned after the last finished chunk.

    Attributes:
        num_chunks: number of finished chunks.
        last: last finished chunk, or None.
        is_complete: whether all chunks are finished and only publishing is left.
        num_lines_before: lines in the finished chunks of ``last``'s file.

    Raises:
        DataError: the folder cannot be written, is in use, or holds the work of another command.
    """

    def __init__(self, prefix: str, description: dict[str, Any], num_streams: int, restart: bool = False) -> None:
        self.path = unfinished_path(prefix)
        self._record_path = record_path(prefix)
        self.offsets = [[0] * len(PARTS) for _ in range(num_streams)]
        self.num_chunks = self.num_lines = self.num_documents = self.num_skipped = 0
        self.num_lines_before = self.source_bytes = self.text_bytes = 0
        self.last: Chunk | None = None
        self.is_complete = False
        self._is_wanted = True
        self._outputs: list[list[PlacedFile]] = []
        self._manifest_path = self.path / "manifest.jsonl"
        self._description = description
        try:
            self._lock()
            found = None if restart else read_description(self._manifest_path)
            if found is not None and self._continues(found):
                self._resume()
            else:
                self._begin()
            if not self.is_complete:
                self._open_outputs()
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error}") from error

    def _lock(self) -> None:
        """Lock the manifest; wait briefly, because workers of a killed run may take a moment to exit."""
        parent = self.path.parent
        if not parent.is_dir():
            raise DataError(
                f"{self.path} cannot be written: the folder {parent} does not exist; create it: mkdir -p {parent}"
            )
        self.path.mkdir(exist_ok=True)
        self._manifest = os.open(self._manifest_path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        deadline = time.monotonic() + _LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self._manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > deadline:
                    raise DataError(f"{self.path} is in use by another process; change --output-prefix") from error
                time.sleep(0.05)
        if not os.path.exists(self._manifest_path):
            raise DataError(f"another process has just finished {self.path}; run the command again to replace it")

    def _continues(self, found: dict[str, Any]) -> bool:
        """Return whether the unfinished work belongs to this command. Work on a changed input is dropped."""
        different = sorted(
            name for name in {*found, *self._description} if found.get(name) != self._description.get(name)
        )
        if different == ["input"]:
            print(f"The input has changed since {self.path} was started: starting over.", flush=True)
            return False
        if different:
            raise DataError(
                f"{self.path} contains unfinished work of a different command ({', '.join(different)} differ); finish "
                "that command, or start over with --restart"
            )
        return True

    def _begin(self) -> None:
        os.ftruncate(self._manifest, 0)
        for path in self.path.iterdir():
            if path != self._manifest_path:
                path.unlink()
        for stream in range(len(self.offsets)):
            for path in stream_paths(self.path, stream):
                path.touch()
        self._append(self._description)

    def _resume(self) -> None:
        """Keep the finished chunks that are intact, and truncate the rest."""
        end = len(json.dumps(self._description)) + 1
        self.is_complete = ends_complete(self._manifest_path)
        if self.is_complete:
            for _, entry in read_entries(self._manifest_path):
                self._count(entry)
            return
        files = [[open(path, "r+b", buffering=0) for path in paths] for paths in self._paths()]  # noqa: SIM115
        try:
            for position, entry in read_entries(self._manifest_path):
                if not all(_is_intact(files[stream], tally) for stream, tally in entry.streams):
                    print(f"{self.path} is damaged at chunk {self.num_chunks}: processing the rest again.", flush=True)
                    break
                self._count(entry)
                end = position
            for parts, offsets in zip(files, self.offsets):
                for file, offset in zip(parts, offsets):
                    file.truncate(offset)
        finally:
            for parts in files:
                for file in parts:
                    file.close()
        os.ftruncate(self._manifest, end)

    def _open_outputs(self) -> None:
        buffer = aligned_buffer()
        for tokens, *others in self._paths():
            self._outputs.append([PlacedFile(tokens, buffer), *(PlacedFile(path) for path in others)])

    def _close_outputs(self) -> None:
        for files in self._outputs:
            for file in files:
                file.close()
        self._outputs = []

    def _paths(self) -> list[tuple[Path, Path, Path]]:
        return [stream_paths(self.path, stream) for stream in range(len(self.offsets))]

    def _append(self, content: dict[str, Any]) -> None:
        _write_all(self._manifest, json.dumps(content).encode("ascii") + b"\n")

    def _count(self, entry: Entry) -> None:
        is_new_file = self.last is None or self.last.file != entry.chunk.file
        self.num_lines_before = entry.num_lines + (0 if is_new_file else self.num_lines_before)
        self.last = entry.chunk
        self.num_chunks += 1
        self.num_lines += entry.num_lines
        self.num_documents += entry.num_documents
        self.num_skipped += entry.num_skipped
        self.source_bytes += entry.chunk.source_bytes
        self.text_bytes += entry.chunk.num_bytes
        for stream, tally in entry.streams:
            for part, num_bytes in enumerate(tally.num_bytes):
                self.offsets[stream][part] += num_bytes

    def commit(self, entry: Entry, contents: Sequence[tuple[bytes | memoryview, bytes, bytes]]) -> None:
        """Write the `PARTS` of each stream of the next chunk, and record the chunk.

        Raises:
            DataError: the chunk cannot be written; earlier chunks stay recorded.
        """
        try:
            for (stream, _), parts in zip(entry.streams, contents):
                for output, part, offset in zip(self._outputs[stream], parts, self.offsets[stream]):
                    output.write(memoryview(part), offset)
            self._append(entry.to_json())
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be written: {error}; fix that and run the same command again to resume"
            ) from error
        before = [offsets[0] // _WRITE_BACK_BYTES for offsets in self.offsets]
        self._count(entry)
        for stream, pieces in enumerate(before):
            if self.offsets[stream][0] // _WRITE_BACK_BYTES > pieces:
                self._start_writing_back(stream, pieces * _WRITE_BACK_BYTES)

    def _start_writing_back(self, stream: int, offset: int) -> None:
        """Start write-back to disk, so that the final sync has little left to write."""
        if hasattr(os, "posix_fadvise"):
            descriptor = os.open(stream_paths(self.path, stream)[0], os.O_RDONLY)
            os.posix_fadvise(descriptor, offset, self.offsets[stream][0] - offset, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    @property
    def token_bytes(self) -> int:
        """Bytes of tokens so far, over all streams."""
        return sum(offsets[0] for offsets in self.offsets)

    def complete(self, groups: Sequence[range], dtypes: Sequence[np.dtype[Any]]) -> None:
        """Append the streams of each data set to its first stream, and write the index files for token ``dtypes``.

        Repeating the call after an interruption gives the same files.
        """
        self._close_outputs()
        for group, dtype in zip(groups, dtypes, strict=True):
            with open(stream_paths(self.path, group[0])[0], "r+b", buffering=0) as tokens:
                tokens.truncate(self.offsets[group[0]][0])
                tokens.seek(0, os.SEEK_END)
                for stream in group[1:]:
                    with open(stream_paths(self.path, stream)[0], "rb", buffering=0) as source:
                        shutil.copyfileobj(source, tokens, _READ_BYTES)
                os.fsync(tokens.fileno())
            paths = [stream_paths(self.path, stream) for stream in group]
            lengths, counts = ([path[part] for path in paths] for part in (1, 2))
            write_index(self._index_path(group), dtype, partial(_pieces, lengths), partial(_pieces, counts))
        _write_all(self._manifest, COMPLETE)
        os.fsync(self._manifest)
        self.is_complete = True

    def _index_path(self, group: range) -> Path:
        return self.path / f"{group[0]}.idx"

    def publish(self, groups: Sequence[range], prefixes: Sequence[str], with_checksums: bool) -> None:
        """Move the files to their final paths, write the record, and remove the folder. Resumes if interrupted.

        Raises:
            DataError: a file cannot be moved.
        """
        try:
            for group, prefix in zip(groups, prefixes):
                tokens, index = stream_paths(self.path, group[0])[0], self._index_path(group)
                if tokens.exists():
                    replace_tokens(prefix, tokens)
                if index.exists():
                    os.replace(index, idx_path(prefix))
                if with_checksums:
                    write_checksums(prefix, self._token_blocks(group))
            write_record(self._record_path, self.path, self._description, prefixes)
            self.discard()
        except OSError as error:
            raise DataError(f"the data sets cannot be written: {error}") from error

    def _token_blocks(self, group: range) -> list[Block]:
        blocks: dict[int, list[Block]] = {stream: [] for stream in group}
        for _, entry in read_entries(self._manifest_path):
            for stream, tally in entry.streams:
                if stream in blocks:
                    blocks[stream] += tally.token_blocks
        return [block for stream in group for block in blocks[stream]]

    def discard(self) -> None:
        """Remove the folder, the manifest last, because it describes the content and holds the lock."""
        rest = [path for path in self.path.iterdir() if path != self._manifest_path]
        for path in rest:
            path.unlink()
        self._manifest_path.unlink()
        self.path.rmdir()

    def forget(self) -> None:
        """Mark the folder for removal by `close`, even if it has finished chunks."""
        self._is_wanted = False

    def close(self) -> None:
        """Close and unlock the folder. Remove it if it has no finished chunk."""
        self._close_outputs()
        if self._manifest_path.exists() and not (self._is_wanted and self.num_chunks):
            self.discard()
        os.close(self._manifest)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _pieces(files: Sequence[Path]) -> Iterator[NDArray[np.int32]]:
    """Yield the int32 values of several files in pieces."""
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while data := file.read(4 * PIECE_LENGTH):
                yield np.frombuffer(data, np.int32)


def _is_intact(files: Sequence[Any], tally: Any) -> bool:
    """Verify the next bytes of a stream's files against their recorded checksums."""
    tokens, lengths, counts = files
    parts = [(tokens, block.num_bytes, block.crc32) for block in tally.token_blocks]
    parts += [(lengths, tally.num_bytes[1], tally.lengths_crc32), (counts, tally.num_bytes[2], tally.counts_crc32)]
    return all(zlib.crc32(file.read(num_bytes)) == crc32 for file, num_bytes, crc32 in parts)
