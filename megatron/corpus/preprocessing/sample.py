"""Take a sample of the input, to compare encoders on."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from typing import Final

from megatron.corpus.json_lines import read_json_lines
from megatron.corpus.preprocessing.chunks import Chunk
from megatron.corpus.preprocessing.input_files import STDIN, InputFile, open_stream, reading_errors

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
