"""Find and open the files that --input names."""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import importlib
import io
import json
import lzma
import os
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import IO, Any

from megatron.core.errors import DataError
from megatron.corpus.preprocessing.documents import LineStream, load_pyarrow, read_table, read_tar, read_texts
from megatron.corpus.preprocessing.file_format import (
    BYTE_ORDER_MARK,
    FileFormat,
    detect_format,
    has_known_suffix,
)

STDIN = "-"
_STREAM_BYTES = 1 << 20


@dataclass(frozen=True)
class InputFile:
    """Name one input with what tells whether it changed; sizes are those on disk, 0 for standard input.

    Attributes:
        kind: what it holds, one of `file_format.KINDS`.
        compression: how it is compressed, or None.
        begin: where its text begins.
        keys: the keys under which documents that are not jsonl get their text.
        members: files of which each is a document, the first of them ``path``; none for other kinds.
    """

    path: str
    num_bytes: int
    modified_ns: int
    kind: str = "jsonl"
    compression: str | None = None
    begin: int = 0
    keys: tuple[str, ...] = ()
    members: tuple[str, ...] = ()

    @property
    def is_plain(self) -> bool:
        """Return whether any part of the text can be read without what stands before it."""
        return self.path != STDIN and self.kind == "jsonl" and self.compression is None

    @property
    def name(self) -> str:
        """Give the name that messages use."""
        return "standard input" if self.path == STDIN else self.path

    def line_name(self, line: int) -> str:
        """Name a line or a document, counted from 0."""
        return self.members[line] if self.members else f"{self.name}:{line + 1}"

    def identity(self) -> list[Any]:
        """Return what tells whether it is the same input again, as JSON values."""
        plain: list[Any] = [self.path, self.num_bytes, self.modified_ns]
        names = zlib.crc32("\0".join(self.members).encode("utf-8", "surrogateescape"))
        return plain if self.kind == "jsonl" else [*plain, self.kind, len(self.members), names]


def find_input(patterns: Sequence[str], keys: Sequence[str] = ("text",), kind: str | None = None) -> list[InputFile]:
    """List the files that paths, folders and patterns name: in the order given, those of one sorted by name.

    ``kind`` says what all files hold; without it each file does.

    Raises:
        DataError: a pattern matches nothing, or what a file holds cannot be read here.
    """
    files: list[InputFile] = []
    for pattern in patterns:
        if pattern == STDIN:
            if kind not in (None, "jsonl"):
                raise DataError(
                    f"--input - is read as jsonl, and --input-format is {kind}; give files, or leave it out"
                )
            files.append(InputFile(STDIN, 0, 0))
            continue
        paths = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise DataError(f"no file matches {pattern}; change --input")
        for path in paths:
            for found in _files_of_folder(path, kind) if os.path.isdir(path) else [path]:
                _add(files, found, detect_format(found, kind), tuple(keys))
    if sum(file.path == STDIN for file in files) > 1:
        raise DataError("--input names standard input (-) more than once")
    for file in files:
        if file.compression == "zst":
            _load_zstandard(file.path)
        if file.kind in ("parquet", "arrow"):
            load_pyarrow(file.path)
        if file.kind == "text" and len(keys) > 1:
            raise DataError(f"{file.path} is one text, and --json-keys names {len(keys)} keys; name one")
    return files


def _files_of_folder(folder: str, kind: str | None) -> list[str]:
    """List the files of a folder and those below it; of a data set that Hugging Face's datasets saved, its parts.

    Texts beside data (a README.md beside Parquet files) are left out.

    Raises:
        DataError: it holds nothing that can be read, or several splits.
    """
    entries = set(os.listdir(folder))
    if "dataset_dict.json" in entries:
        splits = sorted(name for name in entries if os.path.isdir(os.path.join(folder, name)))
        raise DataError(f"{folder} holds the splits {', '.join(splits)}; name one: --input {folder}/{splits[0]}")
    if "state.json" in entries:
        return [os.path.join(folder, name) for name in _saved_parts(os.path.join(folder, "state.json"))]
    everything = _files_below(folder)
    found = [path for path in everything if kind is not None or has_known_suffix(path)]
    if found and len(found) < len(everything):
        others = [path for path in everything if not has_known_suffix(path)]
        named = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        print(
            f"Leaving out {len(others)} files of {folder} whose names do not say what they hold ({named}): name them "
            "in --input, or give --input-format",
            flush=True,
        )
    if not found:
        raise DataError(f"{folder} is not a file and holds none of a known kind (.jsonl, .txt, …); change --input")
    if kind is None:
        data = [path for path in found if detect_format(path).kind != "text"]
        if 0 < len(data) < len(found):
            print(f"Leaving out {len(found) - len(data)} texts beside the data in {folder}", flush=True)
            found = data
    return found


def _files_below(folder: str) -> list[str]:
    """List the files of a folder and those below it by name, through links too, each folder once; no hidden ones."""
    found, seen = [], set()
    for parent, folders, names in os.walk(folder, followlinks=True):
        place = os.path.realpath(parent)
        is_new = place not in seen
        seen.add(place)
        folders[:] = sorted(name for name in folders if is_new and not name.startswith("."))
        found += [os.path.join(parent, name) for name in names if is_new and not name.startswith(".")]
    return sorted(found)


def _saved_parts(path: str) -> list[str]:
    try:
        with open(path, encoding="utf-8") as file:
            names = [str(part["filename"]) for part in json.load(file)["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(
            f"{path} is not that of a data set which Hugging Face saved ({error!r}); name the files themselves"
        ) from error
    if not names:
        raise DataError(f"{path} names no files of data; change --input")
    return names


def _add(files: list[InputFile], path: str, found: FileFormat, keys: tuple[str, ...]) -> None:
    """Append a file; texts that follow each other become one input, since each may be small."""
    if not os.path.isfile(path):
        raise DataError(f"{path} is not a file; change --input")
    status = os.stat(path)
    size, time = status.st_size, status.st_mtime_ns
    members: tuple[str, ...] = (path,) if found.kind == "text" else ()
    last = files[-1] if files else None
    if members and last is not None and last.members and last.compression == found.compression:
        files.pop()
        path, members = last.path, last.members + members
        size, time = last.num_bytes + size, max(last.modified_ns, time)
    begin = found.num_mark_bytes if found.kind == "jsonl" else 0
    files.append(InputFile(path, size, time, found.kind, found.compression, begin, keys, members))


@dataclass(frozen=True)
class TextStream:
    """Hold jsonl, to be read from its beginning, and the file that it comes from."""

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
    """Open compressed jsonl or standard input, or the documents of another kind of file as jsonl."""
    if file.path == STDIN:
        _skip_mark(sys.stdin.buffer)
        return TextStream(sys.stdin.buffer, None)
    if file.kind in ("parquet", "arrow"):
        return TextStream(_as_stream(read_table(file.path, file.kind, file.keys)), None)
    if file.kind == "text":
        return TextStream(_as_stream(read_texts(file.members, file.keys, lambda path: _open(file, path)[0])), None)
    text, source = _open(file, file.path)
    if file.kind == "tar":
        return TextStream(_as_stream(read_tar(text, file.keys)), source)
    _skip_mark(text)
    return TextStream(text, source)


def _as_stream(lines: Iterator[bytes]) -> io.BufferedReader:
    return io.BufferedReader(LineStream(lines), _STREAM_BYTES)


def _open(file: InputFile, path: str) -> tuple[io.BufferedReader, IO[bytes]]:
    """Return what a file holds, decompressed, and the file."""
    source = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the stream
    if file.compression is None:
        plain: Any = io.BufferedReader(source, _STREAM_BYTES)
        return plain, plain
    if file.compression == "zst":
        reader = _load_zstandard(path).ZstdDecompressor().stream_reader(source, read_across_frames=True)
    else:
        opened: dict[str, Callable[[IO[bytes]], Any]] = {"gz": gzip.open, "xz": lzma.open, "bz2": bz2.open}
        reader = opened[file.compression](source)
    return io.BufferedReader(reader, _STREAM_BYTES), source


def _skip_mark(text: Any) -> None:
    if text.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
        text.read(len(BYTE_ORDER_MARK))


def reading_errors() -> tuple[type[Exception], ...]:
    """List what damaged files raise."""
    known: list[type[Exception]] = [OSError, EOFError, zlib.error, lzma.LZMAError, tarfile.TarError]
    with contextlib.suppress(ImportError):
        known.append(importlib.import_module("zstandard").ZstdError)
    return tuple(known)


def _load_zstandard(path: str) -> Any:
    try:
        return importlib.import_module("zstandard")
    except (ImportError, OSError) as error:
        raise DataError(
            f"{path}: reading .zst needs the package zstandard, which cannot be imported ({error}); "
            "install it with: pip install zstandard"
        ) from error
