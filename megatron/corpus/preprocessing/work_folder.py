"""The folder of unfinished work, ``PREFIX.preprocessing``: it grows chunk by chunk and becomes the data sets.

``manifest.jsonl`` says what the work is and which chunks are done; each stream (a key, or a partition of one) has the
files that `stream_paths` names. A chunk counts once its line stands in the manifest, so that a process killed at any
point leaves a folder that can be continued. What the lines say is held against the files before it is trusted.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import time
import zlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.indexed_dataset import (
    PIECE_LENGTH,
    Block,
    idx_path,
    replace_tokens,
    write_checksums,
    write_index,
)
from megatron.core.errors import DataError
from megatron.corpus.preprocessing.chunks import Chunk
from megatron.corpus.preprocessing.manifest import (
    COMPLETE,
    Entry,
    ends_complete,
    read_description,
    read_entries,
)
from megatron.corpus.preprocessing.placed_file import PlacedFile, aligned_buffer
from megatron.corpus.preprocessing.record import write_record

PARTS: Final = ("tokens", "lengths", "counts")
"""The files of a stream, each an array of which every chunk adds a part."""

_LOCK_WAIT_S: Final = 10.0
_READ_BYTES: Final = 1 << 20
_WRITE_BACK_BYTES: Final = 16 << 20


def stream_paths(folder: Path, stream: int) -> tuple[Path, Path, Path]:
    """Return the files of a stream, in the order of `PARTS`."""
    tokens, lengths, counts = (folder / f"{stream}.{part}" for part in PARTS)
    return tokens, lengths, counts


def unfinished_path(prefix: str) -> Path:
    """Return the folder of unfinished work of an output prefix."""
    return Path(f"{prefix}.preprocessing")


def record_path(prefix: str) -> Path:
    """Return the record of finished work of an output prefix."""
    return Path(f"{prefix}.preprocessing.json")


class WorkFolder:
    """Hold the folder open, locked, and positioned behind the last chunk that is done.

    Attributes:
        num_chunks: how many chunks are done.
        last: the last of them, or None.
        is_complete: whether no chunk is missing and only publishing is left.
        num_lines_before: lines of the chunks of ``last``'s file that are done.

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
        """Wait a little: workers of a run that was killed may need a moment to notice."""
        parent = self.path.parent
        if not parent.is_dir():
            raise DataError(f"{self.path} cannot be written: there is no folder {parent}; make it: mkdir -p {parent}")
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
            raise DataError(f"another process just finished {self.path}; run again to do it again")

    def _continues(self, found: dict[str, Any]) -> bool:
        """Return whether the unfinished work is this command's. Work on an input that changed is dropped."""
        different = sorted(
            name for name in {*found, *self._description} if found.get(name) != self._description.get(name)
        )
        if different == ["input"]:
            print(f"The input changed since {self.path} was begun: starting again.", flush=True)
            return False
        if different:
            raise DataError(
                f"{self.path} holds unfinished work of another command ({', '.join(different)} differ); "
                "finish that one, or start again with --restart"
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
        """Take what is done and intact, and cut off the rest."""
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
                    print(f"{self.path} is damaged at chunk {self.num_chunks}: doing the rest again.", flush=True)
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
        """Write the next chunk, the `PARTS` of each of its streams, and record it.

        Raises:
            DataError: it cannot be written; what was recorded before stays.
        """
        try:
            for (stream, _), parts in zip(entry.streams, contents):
                for output, part, offset in zip(self._outputs[stream], parts, self.offsets[stream]):
                    output.write(memoryview(part), offset)
            self._append(entry.to_json())
        except OSError as error:
            raise DataError(
                f"{self.path} cannot be written: {error}; mend that and run the same command again to go on"
            ) from error
        before = [offsets[0] // _WRITE_BACK_BYTES for offsets in self.offsets]
        self._count(entry)
        for stream, pieces in enumerate(before):
            if self.offsets[stream][0] // _WRITE_BACK_BYTES > pieces:
                self._start_writing_back(stream, pieces * _WRITE_BACK_BYTES)

    def _start_writing_back(self, stream: int, offset: int) -> None:
        """Let the disk begin, so that little is left when the whole file has to be on it."""
        if hasattr(os, "posix_fadvise"):
            descriptor = os.open(stream_paths(self.path, stream)[0], os.O_RDONLY)
            os.posix_fadvise(descriptor, offset, self.offsets[stream][0] - offset, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)

    @property
    def token_bytes(self) -> int:
        """Count the bytes of tokens so far, over all streams."""
        return sum(offsets[0] for offsets in self.offsets)

    def complete(self, groups: Sequence[range], dtypes: Sequence[np.dtype[Any]]) -> None:
        """Join the streams of each data set in its first one and write the index files, ``dtypes`` their tokens' types.

        Doing it again, after a kill in the middle of it, gives the same files.
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
        """Move the files to their places, record that, and remove the folder; after a kill, do what is left.

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
        """Remove the folder, the manifest last: it says what is there, and others lock it."""
        rest = [path for path in self.path.iterdir() if path != self._manifest_path]
        for path in rest:
            path.unlink()
        self._manifest_path.unlink()
        self.path.rmdir()

    def forget(self) -> None:
        """Let `close` remove the folder, whatever was done in it."""
        self._is_wanted = False

    def close(self) -> None:
        """Let go of the folder; one in which nothing is done is removed."""
        self._close_outputs()
        if self._manifest_path.exists() and not (self._is_wanted and self.num_chunks):
            self.discard()
        os.close(self._manifest)


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _pieces(files: Sequence[Path]) -> Iterator[NDArray[np.int32]]:
    """Read int32 values that are in several files, one after the other."""
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while data := file.read(4 * PIECE_LENGTH):
                yield np.frombuffer(data, np.int32)


def _is_intact(files: Sequence[Any], tally: Any) -> bool:
    """Compare the next bytes of a stream's files with what was recorded of them."""
    tokens, lengths, counts = files
    parts = [(tokens, block.num_bytes, block.crc32) for block in tally.token_blocks]
    parts += [(lengths, tally.num_bytes[1], tally.lengths_crc32), (counts, tally.num_bytes[2], tally.counts_crc32)]
    return all(zlib.crc32(file.read(num_bytes)) == crc32 for file, num_bytes, crc32 in parts)
