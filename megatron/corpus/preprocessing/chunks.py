"""Cut the input into chunks of whole lines, at places that depend on the input alone."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Final

from megatron.core.errors import DataError
from megatron.corpus.preprocessing.input_files import STDIN, InputFile, open_stream, reading_errors

CHUNK_BYTES: Final = 2 << 20
_SEARCH_BYTES: Final = 64 << 10


@dataclass(frozen=True)
class Chunk:
    """Name a stretch of one input: some whole lines, 2 MiB of them or one longer line.

    Attributes:
        file: which of the inputs.
        begin: where the text starts in it, decompressed.
        num_bytes: how long the text is.
        data: the text itself where only one process can read it: of standard input and of all files but plain jsonl.
        crc32: of all text of the input up to the chunk's end, where only one process can read it, so that a pipe that
            is read again is known to give the same.
        source_bytes: how much of the input on disk that is.
    """

    number: int
    file: int
    begin: int
    num_bytes: int
    data: bytes | None = None
    crc32: int | None = None
    source_bytes: int = 0

    @property
    def end(self) -> int:
        """Return where the next chunk of the file starts."""
        return self.begin + self.num_bytes


def cut_input(files: Sequence[InputFile], first: int = 0, done: Chunk | None = None) -> Iterator[Chunk]:
    """Yield the chunks from number ``first`` on, which follows ``done``.

    Of pipes and of all files but plain jsonl, what was done is read again, but is not yielded.

    Raises:
        DataError: a file cannot be read, or what is read again is not what was done.
    """
    number = first
    for index, file in enumerate(files):
        if done is not None and index < done.file and file.path != STDIN:
            continue
        if file.is_plain:
            chunks = _cut_plain(file, done.end if done is not None and done.file == index else file.begin)
        else:
            chunks = _cut_stream(file)
        is_same = file.is_plain or done is None or done.file != index
        for chunk in chunks:
            if done is None or (index, chunk.begin) >= (done.file, done.end):
                if not is_same:
                    break
                yield replace(chunk, number=number, file=index)
                number += 1
            elif index == done.file and chunk.end == done.end:
                is_same = chunk.crc32 == done.crc32
        if not is_same:
            raise DataError(
                f"{file.name} does not give the text again that the unfinished work is of; give it that, or start "
                "again with --restart"
            )


def read_chunk(chunk: Chunk, file: InputFile) -> bytes:
    """Return the text of a chunk.

    Raises:
        DataError: the file cannot be read, or has become shorter.
    """
    if chunk.data is not None:
        return chunk.data
    try:
        descriptor = os.open(file.path, os.O_RDONLY)
        try:
            data = os.pread(descriptor, chunk.num_bytes, chunk.begin)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error}") from error
    if len(data) != chunk.num_bytes:
        raise DataError(f"{file.path} became shorter while it was read; run again when it is whole")
    return data


def _cut_plain(file: InputFile, begin: int) -> Iterator[Chunk]:
    """Find line ends near the places where chunks should end; nothing else is read."""
    try:
        with open(file.path, "rb", buffering=0) as source:
            while begin < file.num_bytes:
                end = begin + CHUNK_BYTES
                if end < file.num_bytes:
                    end = _next_line(source, end - 1, file.num_bytes)
                end = min(end, file.num_bytes)
                yield Chunk(0, 0, begin, end - begin, source_bytes=end - begin)
                begin = end
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error}") from error


def _next_line(source: IO[bytes], position: int, num_bytes: int) -> int:
    """Return the place behind the first line end at ``position`` or later."""
    while position < num_bytes:
        part = os.pread(source.fileno(), _SEARCH_BYTES, position)
        if not part:
            return num_bytes
        newline = part.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(part)
    return num_bytes


def _cut_stream(file: InputFile) -> Iterator[Chunk]:
    begin = position = crc32 = 0
    errors = reading_errors()
    try:
        with contextlib.closing(open_stream(file)) as stream:
            while data := stream.text.read(CHUNK_BYTES):
                if not data.endswith(b"\n"):
                    data += stream.text.readline()
                before, position = position, stream.source_position(begin + len(data))
                crc32 = zlib.crc32(data, crc32)
                yield Chunk(0, 0, begin, len(data), data, crc32, position - before)
                begin += len(data)
    except errors as error:
        raise DataError(f"{file.name} cannot be read after {begin} bytes of text: {error}") from error
