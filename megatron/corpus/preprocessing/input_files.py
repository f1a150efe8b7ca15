"""Find and open the files that --input names."""

from __future__ import annotations

import contextlib
import glob
import gzip
import importlib
import io
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, Any

from megatron.core.errors import DataError

STDIN = "-"
_GZIP, _ZSTD = ".gz", ".zst"


@dataclass(frozen=True)
class InputFile:
    """Name one input with what tells whether it changed; sizes are those on disk, 0 for standard input."""

    path: str
    num_bytes: int
    modified_ns: int

    @property
    def is_plain(self) -> bool:
        """Return whether any part of the text can be read without what stands before it."""
        return self.path != STDIN and not self.path.endswith((_GZIP, _ZSTD))

    @property
    def name(self) -> str:
        """Give the name that messages use."""
        return "standard input" if self.path == STDIN else self.path


def find_input(patterns: Sequence[str]) -> list[InputFile]:
    """List the files that paths and patterns name: in the order given, those of one pattern sorted by name.

    Raises:
        DataError: a pattern matches nothing, a path is not a file, or what is compressed cannot be read here.
    """
    files = []
    for pattern in patterns:
        if pattern == STDIN:
            files.append(InputFile(STDIN, 0, 0))
            continue
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise DataError(f"no file matches {pattern}; change --input")
        for path in paths:
            if not os.path.isfile(path):
                raise DataError(f"{path} is not a file; change --input")
            status = os.stat(path)
            files.append(InputFile(path, status.st_size, status.st_mtime_ns))
    if sum(file.path == STDIN for file in files) > 1:
        raise DataError("--input names standard input (-) more than once")
    for file in files:
        if file.path.endswith(_ZSTD):
            _load_zstandard(file.path)
    return files


@dataclass(frozen=True)
class TextStream:
    """Hold decompressed text, to be read from its beginning, and the file that it comes from."""

    text: IO[bytes]
    source: IO[bytes] | None

    def source_position(self, text_position: int) -> int:
        """Return how many bytes of the file on disk were read for this much text."""
        return text_position if self.source is None else self.source.tell()

    def close(self) -> None:
        """Close the text and the file."""
        self.text.close()
        if self.source is not None:
            self.source.close()


def open_stream(file: InputFile) -> TextStream:
    """Open a compressed file, or standard input."""
    if file.path == STDIN:
        return TextStream(sys.stdin.buffer, None)
    source = open(file.path, "rb", buffering=0)  # noqa: SIM115 - closed with the stream
    if file.path.endswith(_GZIP):
        return TextStream(io.BufferedReader(gzip.GzipFile(fileobj=source), 1 << 20), source)
    reader = _load_zstandard(file.path).ZstdDecompressor().stream_reader(source, read_across_frames=True)
    return TextStream(io.BufferedReader(reader, 1 << 20), source)


def decompression_errors() -> tuple[type[Exception], ...]:
    """List what damaged compressed files raise."""
    known: list[type[Exception]] = [OSError, EOFError, importlib.import_module("zlib").error]
    with contextlib.suppress(ImportError):
        known.append(importlib.import_module("zstandard").ZstdError)
    return tuple(known)


def _load_zstandard(path: str) -> Any:
    try:
        return importlib.import_module("zstandard")
    except (ImportError, OSError) as error:
        raise DataError(
            f"{path}: reading {_ZSTD} needs the package zstandard, which cannot be imported ({error}); "
            "install it with: pip install zstandard"
        ) from error
