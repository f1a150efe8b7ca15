"""Find the files of ``--input`` and read their documents one at a time."""

from __future__ import annotations

import codecs
import contextlib
import glob
import gzip
import io
import json
import os
import re
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import IO, Any, Final

from megatron.core.errors import ConfigurationError, DataError
from megatron.core.tokenizers import load_package
from megatron.data.input_files import STDIN

TEXT_SUFFIXES: Final = (".txt", ".text", ".md")
JSONL_SUFFIXES: Final = (".jsonl", ".json", ".ndjson")
COMPRESSED_SUFFIXES: Final = (".gz", ".zst")

# UTF-32 comes before UTF-16, because its byte-order mark starts with that of UTF-16.
_BYTE_ORDER_MARKS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SURROGATE: Final = re.compile("[\ud800-\udfff]")


@dataclass(frozen=True)
class Source:
    """One input file.

    Attributes:
        path: the file, or ``-`` for standard input.
        name: path relative to the input folder, recorded as the source of a plain-text document.
        is_jsonl: whether each line is a document, rather than the whole file.
    """

    path: str
    name: str
    is_jsonl: bool


@dataclass(frozen=True)
class Document:
    """One document and its location.

    Attributes:
        line: JSONL line of the document, without its line end. None for a plain-text file.
        source_bytes: bytes on disk read from all input files, up to and including this document.
    """

    place: str
    text: str
    url: str | None
    record: dict[str, Any]
    line: bytes | None
    source_bytes: int

    def to_line(self, text: str, text_key: str) -> bytes:
        """Return the JSONL line of this document with another text.

        A line with unchanged text is copied verbatim.
        """
        if self.line is not None and text == self.text:
            return self.line + b"\n"
        record = {**self.record, text_key: text}
        try:
            return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
        except UnicodeEncodeError:  # a lone surrogate under another key needs an escape
            return json.dumps(record).encode("ascii") + b"\n"


def find_inputs(patterns: Sequence[str]) -> list[str]:
    """List the files and folders of paths and glob patterns, in order; matches of one pattern are sorted by path.

    Raises:
        DataError: a path does not exist or occurs twice.
    """
    inputs: list[str] = []
    for pattern in patterns:
        paths = [pattern] if pattern == STDIN or os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise DataError(f"no file matches {pattern}; change --input")
        for path in paths:
            if path != STDIN and not os.path.isdir(path) and not os.path.isfile(path):
                raise DataError(f"{path} is neither a file nor a folder; change --input")
        inputs += paths
    seen: set[str] = set()
    for path in inputs:
        real = path if path == STDIN else os.path.realpath(path)
        if real in seen:
            raise DataError(f"--input names {path} more than once")
        seen.add(real)
    for path in seen - {STDIN}:
        parent = os.path.dirname(path)
        while parent not in seen and parent != os.path.dirname(parent):
            parent = os.path.dirname(parent)
        if parent in seen and parent != path:
            raise DataError(f"--input names {path} more than once: it is in {parent}")
    return inputs


def is_read(path: str, inputs: Sequence[str]) -> bool:
    """Return whether an existing file is an input, or a file of a known type in an input folder."""
    if not os.path.exists(path):
        return False
    real = os.path.realpath(path)
    folders = (os.path.join(os.path.realpath(name), "") for name in inputs if name != STDIN and os.path.isdir(name))
    return any(name != STDIN and os.path.realpath(name) == real for name in inputs) or (
        _is_known(real) and any(real.startswith(folder) for folder in folders)
    )


def walk_sources(inputs: Sequence[str], input_format: str, on_unknown: Callable[[str], None]) -> Iterator[Source]:
    """Yield the files of all inputs, with the names of one folder in memory at a time.

    The files of a folder are sorted by name and come before those of its subfolders. Hidden files are skipped. Files of
    unknown types in a folder are skipped after a call of ``on_unknown``.
    """
    for path in inputs:
        if path == STDIN:
            yield Source(STDIN, STDIN, input_format != "text")
        elif not os.path.isdir(path):
            yield Source(path, os.path.basename(path), _is_jsonl(path, input_format))
        else:
            for folder, subfolders, names in os.walk(path):
                subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
                for name in sorted(names):
                    file = os.path.join(folder, name)
                    if _is_known(file):
                        within = os.fsencode(os.path.relpath(file, path)).decode("utf-8", "replace")
                        yield Source(file, within, _is_jsonl(file, input_format))
                    elif not name.startswith("."):
                        on_unknown(file)


def no_source(inputs: Sequence[str]) -> DataError:
    """Return the error for folders without readable files."""
    kinds = ", ".join((*TEXT_SUFFIXES, *JSONL_SUFFIXES))
    return DataError(
        f"{' '.join(inputs)} contains no file that ends in {kinds} (or these with {' or '.join(COMPRESSED_SUFFIXES)}); "
        "select other files with a pattern, as in 'DIR/*'"
    )


def _is_known(path: str) -> bool:
    return not os.path.basename(path).startswith(".") and _inner_suffix(path) in (*TEXT_SUFFIXES, *JSONL_SUFFIXES)


def _inner_suffix(path: str) -> str:
    stem, suffix = os.path.splitext(path)
    return (os.path.splitext(stem)[1] if suffix.lower() in COMPRESSED_SUFFIXES else suffix).lower()


def _is_jsonl(path: str, input_format: str) -> bool:
    return _inner_suffix(path) in JSONL_SUFFIXES if input_format == "auto" else input_format == "jsonl"


class InputPosition:
    """Number of bytes on disk that have been read from the input files."""

    def __init__(self) -> None:
        self._closed_bytes = 0
        self._file: IO[bytes] | None = None

    @contextlib.contextmanager
    def within(self, file: IO[bytes]) -> Iterator[None]:
        """Track the position of an open file within the context."""
        self._file = file
        try:
            yield
        finally:
            self._closed_bytes, self._file = self.num_bytes, None

    @property
    def num_bytes(self) -> int:
        """Bytes read from the closed files and the current file."""
        return self._closed_bytes + (0 if self._file is None else self._file.tell())


@dataclass(frozen=True)
class DocumentReader:
    """Reader that holds one document in memory at a time.

    Attributes:
        max_document_bytes: limit on a document's size, which bounds the memory. Longer documents are rejected.
        allow_surrogates: whether a text may hold lone surrogates, which UTF-8 cannot encode.
        on_bad_document: called with a one-line report of each unreadable document, which is skipped. It may raise
            to end the work.
        position: tracks the bytes read from the files.
    """

    text_key: str
    url_key: str
    encoding: str
    max_document_bytes: int
    allow_surrogates: bool
    on_bad_document: Callable[[str], None]
    position: InputPosition = field(default_factory=InputPosition)

    def read(self, source: Source) -> Iterator[Document]:
        """Yield the documents of one file.

        Raises:
            DataError: the file cannot be read or decompressed.
        """
        errors: list[type[Exception]] = [OSError, EOFError, zlib.error]
        if source.path.endswith(".zst"):
            errors.append(load_package("zstandard", source.path, ConfigurationError).ZstdError)
        try:
            if source.path == STDIN:
                with os.fdopen(os.dup(sys.stdin.fileno()), "rb") as stream:
                    yield from self._documents(source, stream)
                return
            with (
                open(source.path, "rb", buffering=1 << 20) as file,
                self.position.within(file),
                _decompressed(source.path, file) as stream,
            ):
                yield from self._documents(source, stream)
        except tuple(errors) as error:
            raise DataError(f"{source.path} cannot be read: {error}") from error

    def _documents(self, source: Source, stream: IO[bytes] | gzip.GzipFile) -> Iterator[Document]:
        return self._lines(source, stream) if source.is_jsonl else self._whole(source, stream)

    def _lines(self, source: Source, stream: IO[bytes] | gzip.GzipFile) -> Iterator[Document]:
        number = 0
        while line := stream.readline(self.max_document_bytes + 1):
            number += 1
            place = f"{source.path}:{number}"
            if len(line) > self.max_document_bytes and not line.endswith(b"\n"):
                while rest := stream.readline(self.max_document_bytes):
                    if rest.endswith(b"\n"):
                        break
                self.on_bad_document(f"{place}: longer than --max-document-bytes {self.max_document_bytes}")
                continue
            if number == 1:
                line = line.removeprefix(codecs.BOM_UTF8)
            if line and not line.isspace():
                try:
                    yield self._parse(line.rstrip(b"\r\n"), place)
                except DataError as error:
                    self.on_bad_document(str(error))

    def _parse(self, line: bytes, place: str) -> Document:
        try:
            record = json.loads(line.decode("utf-8"))
        except (ValueError, RecursionError) as error:  # JSONDecodeError, UnicodeDecodeError
            raise DataError(f"{place}: not a JSON line: {error}") from error
        if not isinstance(record, dict):
            raise DataError(f"{place}: a JSON object is expected, but the line contains {type(record).__name__}")
        if self.text_key not in record:
            raise DataError(
                f"{place}: no key {self.text_key!r} (found: {', '.join(record)}); change --text-key or the line"
            )
        text, url = record[self.text_key], record.get(self.url_key)
        if not isinstance(text, str):
            raise DataError(f"{place}: {self.text_key!r} contains {type(text).__name__}; a string is expected")
        if not self.allow_surrogates and _has_surrogates(text):
            raise DataError(f"{place}: {self.text_key!r} contains half a surrogate pair; add --fix-encoding")
        if url is not None and not isinstance(url, str):
            raise DataError(f"{place}: {self.url_key!r} contains {type(url).__name__}; a string is expected")
        return Document(place, text, url, record, line, self.position.num_bytes)

    def _whole(self, source: Source, stream: IO[bytes] | gzip.GzipFile) -> Iterator[Document]:
        data = stream.read(self.max_document_bytes + 1)
        if len(data) > self.max_document_bytes:
            self.on_bad_document(f"{source.path}:1: longer than --max-document-bytes {self.max_document_bytes}")
            return
        encoding = next((name for mark, name in _BYTE_ORDER_MARKS if data.startswith(mark)), self.encoding)
        try:
            text = data.decode(encoding)
        except UnicodeError as error:
            start = error.start if isinstance(error, UnicodeDecodeError) else 0
            line = data.count(b"\n", 0, start) + 1
            self.on_bad_document(f"{source.path}:{line}: not {encoding} text: {error}; change --input-encoding")
            return
        record = {self.text_key: text, "source": source.name}
        yield Document(f"{source.path}:1", text, None, record, None, self.position.num_bytes)


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and _SURROGATE.search(text) is not None


def _decompressed(path: str, file: IO[bytes]) -> AbstractContextManager[IO[bytes] | gzip.GzipFile]:
    """Return a decompressed stream of a file, which does not close the file."""
    if path.endswith(".gz"):
        return gzip.open(file, "rb")
    if path.endswith(".zst"):
        decompressor = load_package("zstandard", path, ConfigurationError).ZstdDecompressor()
        return io.BufferedReader(decompressor.stream_reader(file, read_across_frames=True, closefd=False), 1 << 20)
    return contextlib.nullcontext(file)
