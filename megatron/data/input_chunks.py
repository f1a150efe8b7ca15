"""Split the input into chunks of whole lines, and sample it.

The chunk boundaries depend only on the input. The sample is used to compare encoders.
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
    """Whole lines of one input, about 2 MiB or one longer line.

    Attributes:
        file: index of the input.
        begin: start offset in the decompressed text.
        num_bytes: length of the text.
        data: the text of inputs that only one process can read: standard input and all files except plain JSONL.
        crc32: for these inputs, checksum of the text up to the end of the chunk, which detects a changed input
            on resume.
        source_bytes: size of the chunk in the input on disk.
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
        """Start offset of the next chunk of the file."""
        return self.begin + self.num_bytes


def cut_input(files: Sequence[InputFile], first: int = 0, done: Chunk | None = None) -> Iterator[Chunk]:
    """Yield the chunks from number ``first``, which follows the chunk ``done``.

    Inputs other than plain JSONL files are read again from the start, but finished chunks are not yielded.

    Raises:
        DataError: a file cannot be read, or the finished part of an input has changed.
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
                f"{file.name} does not contain the same text as before the interruption; pass the same text, or start "
                "over with --restart"
            )


def read_chunk(chunk: Chunk, file: InputFile) -> bytes:
    """Return the text of a chunk.

    Raises:
        DataError: the file cannot be read, or it was truncated.
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
        raise DataError(f"{file.path} became shorter while it was read; run again when the file is complete")
    return data


def _cut_plain(file: InputFile, begin: int) -> Iterator[Chunk]:
    """Yield chunks of a plain file; read only around the chunk boundaries, to find line ends."""
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
    """Return the offset after the first line end at or after ``position``."""
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
    """Sample texts at evenly spaced offsets of plain files, and at the start of other files.

    The sample is a thousandth of the input, between 64 KiB and 2 MiB. ``first`` is the first chunk of the input. Lines
    without text are ignored.
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
    """Return the keys of the first JSON object near the start of a file."""
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
    """Read some whole lines at evenly spaced offsets of the concatenated files."""
    step = max(sum(file.num_bytes for file in files) // _PLACES, 1)
    blocks = []
    position = 0
    for file in files:
        for place in range(-position % step, file.num_bytes, step):
            blocks.append(_lines_at(file, place))
        position += file.num_bytes
    return blocks


def _lines_at(file: InputFile, place: int) -> bytes:
    """Read the whole lines that start after an offset, including a long line completely."""
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
        return []  # reading the whole file will report the error and its position


def _beginning_of_text(text: bytes) -> bytes:
    """Truncate a text at a character boundary."""
    end = min(len(text), _TEXT_BYTES)
    while end < len(text) and text[end] & 0xC0 == 0x80:
        end -= 1
    return text[:end]
