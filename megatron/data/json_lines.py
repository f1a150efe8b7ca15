"""Read the texts of JSONL: one JSON object per line, with a text or a list of texts under each key."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.errors import DataError, TokenizerError
from megatron.core.tokenizers import require_unicode

ExtractTexts = Callable[[bytes, Sequence[bytes]], tuple[list[bytes | None], NDArray[np.int64], int]]
"""Function from a block and keys to the text of each document and key (None: `parse_line` must parse it), the (line,
begin, end) of each document, and the number of lines."""


@dataclass(frozen=True)
class Problem:
    """Number of a line, counted from 0, and the problem with it."""

    line: int
    message: str


@dataclass(frozen=True)
class JsonLines:
    """Documents of a block of lines.

    Attributes:
        texts: for each key, the UTF-8 texts of all documents, in order.
        num_texts: for each key, the number of texts of each document, int64 ``[documents]``.
        lines: line of each document, counted from 0, int64 ``[documents]``.
        num_lines: number of lines in the block, including blank ones.
        problems: lines without a valid document.
    """

    texts: tuple[list[bytes], ...]
    num_texts: tuple[NDArray[np.int64], ...]
    lines: NDArray[np.int64]
    num_lines: int
    problems: list[Problem]


def parse_line(line: bytes, keys: Sequence[str]) -> list[list[bytes]]:
    """Parse the texts of one line; return a list of texts for each key.

    Raises:
        DataError: the line is not UTF-8 or not a JSON object, or a key is missing or holds no text.
    """
    try:
        content = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise DataError("not UTF-8 text") from error
    except (ValueError, RecursionError) as error:  # JSONDecodeError
        raise DataError(f"not a JSON line: {error}") from error
    if not isinstance(content, dict):
        raise DataError(f"a JSON object is expected, but the line contains {type(content).__name__}")
    texts = []
    for key in keys:
        if key not in content:
            raise DataError(f"no key {key!r} (found: {', '.join(content)}); change --json-keys or the line")
        value = content[key]
        parts = value if isinstance(value, list) else [value]
        for part in parts:
            if not isinstance(part, str):
                raise DataError(f"{key!r} contains {type(part).__name__}; a string or a list of strings is expected")
        try:
            require_unicode(parts)
        except TokenizerError as error:
            raise DataError(str(error)) from error
        texts.append([part.encode("utf-8") for part in parts])
    return texts


def list_lines(block: bytes, keys: Sequence[bytes]) -> tuple[list[bytes | None], NDArray[np.int64], int]:
    """Find the non-blank lines of a block for `parse_line`; the Python counterpart of the compiled reader."""
    places = []
    begin = number = 0
    while begin < len(block):
        newline = block.find(b"\n", begin)
        end = len(block) if newline < 0 else newline
        if not (end == begin or block[begin:end].isspace()):
            places.append((number, begin, end))
        begin = end + 1
        number += 1
    nothing: list[bytes | None] = [None] * (len(places) * len(keys))
    return nothing, np.array(places, np.int64).reshape(-1, 3), number


def find_compiled_reader() -> ExtractTexts | None:
    """Return the compiled reader, or None if it was not built."""
    try:
        from megatron.data import _json_lines
    except ImportError:
        return None
    return _json_lines.extract_texts


_PYTHON: Final[ExtractTexts] = list_lines


def read_json_lines(block: bytes, keys: Sequence[str], extract_texts: ExtractTexts | None = None) -> JsonLines:
    """Read a block of whole lines. Without ``extract_texts``, reading is slower but gives the same result."""
    extracted, places, num_lines = (extract_texts or _PYTHON)(block, [key.encode("utf-8") for key in keys])
    stride = len(keys)
    if None not in extracted:
        whole = [text for text in extracted if text is not None] if stride == 0 else extracted
        ones = np.ones(len(places), np.int64)
        texts = tuple(whole[k::stride] for k in range(stride))
        return JsonLines(texts, (ones,) * stride, places[:, 0], num_lines, [])  # type: ignore[arg-type]
    return _read_some_slowly(block, keys, extracted, places, num_lines)


def _read_some_slowly(
    block: bytes,
    keys: Sequence[str],
    extracted: list[bytes | None],
    places: NDArray[np.int64],
    num_lines: int,
) -> JsonLines:
    """Parse the lines that the reader did not parse, and merge them with the others."""
    stride = len(keys)
    texts: tuple[list[bytes], ...] = tuple([] for _ in keys)
    counts: tuple[list[int], ...] = tuple([] for _ in keys)
    lines: list[int] = []
    problems: list[Problem] = []
    for index, (line, begin, end) in enumerate(places.tolist()):
        known = [text for text in extracted[index * stride : (index + 1) * stride] if text is not None]
        try:
            document = [[text] for text in known] if known else parse_line(block[begin:end], keys)
        except DataError as error:
            problems.append(Problem(line, str(error)))
            continue
        lines.append(line)
        for k, parts in enumerate(document):
            texts[k].extend(parts)
            counts[k].append(len(parts))
    num_texts = tuple(np.array(count, np.int64) for count in counts)
    return JsonLines(texts, num_texts, np.array(lines, np.int64), num_lines, problems)
