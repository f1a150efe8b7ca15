"""Split the input into chunks of whole lines, and sample it.

The boundaries of the chunks depend on the input alone. The sample serves to compare encoders.
"""

from __future__ import annotations

import contextlib
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Final

from megatron.core.errors import DataError
from megatron.data.input_files import STDIN, InputFile, open_stream, reading_errors
from megatron.data.json_lines import read_json_lines

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


_PLACES: Final = 16
_PART_BYTES: Final = 64 << 10
_MIN_BYTES, _MAX_BYTES = 64 << 10, 2 << 20
_SHARE: Final = 1 / 1000
_TEXT_BYTES: Final = 4 << 10


def take_sample(files: Sequence[InputFile], keys: Sequence[str], first: Chunk | None) -> list[bytes]:
    """Return parts of texts: from evenly spread places of plain files, and from the beginnings of others.

    A thousandth of the input, 64 KiB at least and 2 MiB at most. ``first`` is the first chunk of the input. Lines that
    hold no text are passed over here.
    """
    blocks = [first.data] if first is not None and first.data is not None else []
    blocks += _spread([file for file in files if file.is_plain])
    for file in [file for file in files if not file.is_plain and file.path != STDIN][:_PLACES]:
        blocks += _beginning(file)
    budget = min(max(int(_SHARE * sum(file.num_bytes for file in files)), _MIN_BYTES), _MAX_BYTES)
    sample: list[bytes] = []
    per_block = budget // max(len(blocks), 1) + 1
    for block in blocks:
        taken = 0
        for texts in read_json_lines(block, keys).texts:
            for text in texts:
                if taken < per_block:
                    sample.append(_beginning_of_text(text))
                    taken += len(sample[-1])
    return sample


def first_keys(files: Sequence[InputFile]) -> list[str]:
    """Return the keys of the first line that has any, as far as the beginning of each file goes."""
    for file in files:
        blocks = [_lines_at(file, file.begin)] if file.is_plain else _beginning(file) if file.path != STDIN else []
        for line in b"".join(blocks).splitlines():
            try:
                content = json.loads(line)
            except ValueError:
                continue
            if isinstance(content, dict) and content:
                return list(content)
    return []


def _spread(files: Sequence[InputFile]) -> list[bytes]:
    """Read some whole lines at evenly spread places of files laid behind each other."""
    step = max(sum(file.num_bytes for file in files) // _PLACES, 1)
    blocks = []
    position = 0
    for file in files:
        for place in range(-position % step, file.num_bytes, step):
            blocks.append(_lines_at(file, place))
        position += file.num_bytes
    return blocks


def _lines_at(file: InputFile, place: int) -> bytes:
    """Read the whole lines that start near a place; all of a long one."""
    with open(file.path, "rb") as source:
        source.seek(place)
        if place:
            source.readline(_MAX_BYTES)
        data = source.read(_PART_BYTES)
        return data[: data.rfind(b"\n") + 1] or data + source.readline(_MAX_BYTES)


def _beginning(file: InputFile) -> list[bytes]:
    errors = reading_errors()
    try:
        with contextlib.closing(open_stream(file)) as stream:
            return [stream.text.read(_PART_BYTES) + stream.text.readline(_MAX_BYTES)]
    except errors:
        return []  # reading the whole file will say what is wrong with it, and where


def _beginning_of_text(text: bytes) -> bytes:
    """Cut a text behind a whole character."""
    end = min(len(text), _TEXT_BYTES)
    while end < len(text) and text[end] & 0xC0 == 0x80:
        end -= 1
    return text[:end]
