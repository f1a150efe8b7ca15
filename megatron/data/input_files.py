"""Find and open the input files of preprocessing: JSONL, JSON arrays, text, Parquet, Arrow and WebDataset tars.

The format is detected from a file's first bytes and its name. Files of other formats are converted to JSON lines.
"""

from __future__ import annotations

import bz2
import contextlib
import glob
import gzip
import importlib
import io
import itertools
import json
import lzma
import os
import posixpath
import re
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any, Final

from megatron.core.datasets import array_lines, is_array
from megatron.core.errors import DataError

KINDS: Final = ("jsonl", "json", "text", "parquet", "arrow", "tar")
"""``json`` is an array of objects."""
TEXT_KINDS: Final = ("jsonl", "json", "text")
_NUM_BEGINNING_BYTES: Final = 4096
NUM_TEXT_DOCUMENTS: Final = 100
"""Number of documents into which a single text file is cut, so that --split can divide it."""
_LEAST_DOCUMENT_LENGTH: Final = 100
BYTE_ORDER_MARK: Final = b"\xef\xbb\xbf"

_COMPRESSIONS: Final = {".gz": "gz", ".zst": "zst", ".xz": "xz", ".bz2": "bz2"}
_SUFFIXES: Final = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".md": "text",
    ".markdown": "text",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".feather": "arrow",
    ".tar": "tar",
    ".tgz": "tar",
}
_COMPRESSED_BEGINNINGS: Final = {b"\x1f\x8b": "gz", b"\x28\xb5\x2f\xfd": "zst", b"\xfd7zXZ\0": "xz", b"BZh": "bz2"}
_KIND_BEGINNINGS: Final = {b"PAR1": "parquet", b"ARROW1": "arrow"}
_FOREIGN_BEGINNINGS: Final = {
    b"PK\x03\x04": "a zip archive (or an Office document); unpack it and pass its files",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it and pass its files",
    b"Rar!": "a rar archive; unpack it and pass its files",
    b"%PDF": "a PDF; write its text to a .txt file first",
    b"\x89HDF": "an HDF5 file; write its texts to Parquet or jsonl first",
    b"SQLite format 3": "an SQLite database; write its texts to Parquet or jsonl first",
    b"Obj\x01": "an Avro file; write it to Parquet or jsonl first",
    b"ORC": "an ORC file; write it to Parquet or jsonl first",
}
_OBJECT: Final = re.compile(rb'\s*\{\s*["}]')
_ARRAY_OF_OBJECTS: Final = re.compile(rb"\s*\[\s*\{")
_ENCODINGS: Final = {
    b"\xff\xfe\0\0": "UTF-32",
    b"\0\0\xfe\xff": "UTF-32",
    b"\xff\xfe": "UTF-16",
    b"\xfe\xff": "UTF-16",
    b"{\0": "UTF-16LE",
    b"\0{": "UTF-16BE",
}


@dataclass(frozen=True)
class FileFormat:
    """Format of a file: one of `KINDS`, its compression, and the size of its byte-order mark."""

    kind: str
    compression: str | None
    num_mark_bytes: int


def has_known_suffix(path: str) -> bool:
    return _named(path)[0] is not None


def detect_format(path: str, wanted: str | None = None) -> FileFormat:
    """Detect the format of a file from ``wanted``, its first bytes, or its name, in this order.

    A file that starts with a JSON object is JSONL, and a file that starts with an array of objects is JSON. Any other
    file is text, unless its name ends in .jsonl, .json or .ndjson.

    Raises:
        DataError: the file cannot be read, its encoding is not UTF-8, or its format is not supported.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            beginning = file.read(_NUM_BEGINNING_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    named, compression = _named(path)
    compression = compression or _begins(beginning, _COMPRESSED_BEGINNINGS)
    kind = wanted or named
    if compression is None:
        kind = wanted or _begins(beginning, _KIND_BEGINNINGS) or named
    if kind is None or kind in TEXT_KINDS:
        if compression is not None:
            beginning = _decompressed_beginning(path, compression)
        _check_encoding(path, beginning)
        foreign = _begins(beginning, _FOREIGN_BEGINNINGS)
        if foreign is not None:
            raise DataError(f"{path} is {foreign}")
        kind = wanted or _text_kind(beginning.removeprefix(BYTE_ORDER_MARK), named)
    mark = len(BYTE_ORDER_MARK) if compression is None and beginning.startswith(BYTE_ORDER_MARK) else 0
    return FileFormat(kind, compression, mark)


def _text_kind(beginning: bytes, named: str | None) -> str:
    """Return the one of `TEXT_KINDS` that a file has, by its beginning and the kind of its name."""
    if _OBJECT.match(beginning):
        return "jsonl"
    if _ARRAY_OF_OBJECTS.match(beginning) or (named == "jsonl" and is_array(beginning)):
        return "json"
    return "text" if named is None and beginning.strip() else named or "jsonl"


def _decompressed_beginning(path: str, compression: str) -> bytes:
    """Return the first bytes of a compressed file; empty for a damaged file, which is reported when it is read."""
    try:
        text, source = _open(path, compression)
        with text, source:
            return text.read(_NUM_BEGINNING_BYTES)
    except reading_errors():
        return b""


def advice(line: bytes) -> str | None:
    """Return advice on a line that is not a JSON object; None if it looks like a damaged JSON object."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return (
            f"byte 0x{line[error.start]:02x} is invalid (perhaps Latin-1 or Windows-1252); convert the file with iconv "
            "-f WINDOWS-1252 -t UTF-8 FILE > NEW"
        )
    if line.lstrip().startswith(b"["):
        return "pass --input-format json to read a JSON array, or convert it to lines with: jq -c '.[]' FILE > NEW"
    if line.lstrip().startswith((b"{", b'"')):
        return None
    return "if it is plain text, pass --input-format text, or give the file a name that ends in .txt"


def _named(path: str) -> tuple[str | None, str | None]:
    stem, suffix = os.path.splitext(path.lower())
    compression = _COMPRESSIONS.get(suffix)
    if compression is not None:
        suffix = os.path.splitext(stem)[1]
    return _SUFFIXES.get(suffix), "gz" if suffix == ".tgz" else compression


def _begins(beginning: bytes, known: dict[bytes, str]) -> str | None:
    return next((name for start, name in known.items() if beginning.startswith(start)), None)


def _check_encoding(path: str, beginning: bytes) -> None:
    encoding = _begins(beginning, _ENCODINGS)
    if encoding is not None:
        raise DataError(
            f"{path} is encoded in {encoding}, but UTF-8 is expected; convert it: iconv -f {encoding} -t UTF-8 {path} "
            "> NEW"
        )


_ROWS: Final = 64
_ENDS: Final = (re.compile(r"\n(?:[ \t\r]*\n)+"), re.compile(r"\n"), re.compile(r"\s"))
"""Ends of a document in a text: blank lines, a line end, or white space."""
_TEXT_MEMBERS: Final = ("txt", "md")
"""Suffixes of tar members that hold a sample's ``text`` if there is no member of that name."""


class LineStream(io.RawIOBase):
    """Byte stream over an iterator of lines, which are generated on demand."""

    def __init__(self, lines: Iterable[bytes]) -> None:
        self._lines = iter(lines)
        self._rest = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Read the next bytes into a buffer and return their number; 0 at the end."""
        if not self._rest:
            self._rest = memoryview(next(self._lines, b""))
        count = min(len(buffer), len(self._rest))
        buffer[:count] = self._rest[:count]
        self._rest = self._rest[count:]
        return count


def read_texts(
    paths: Iterable[str], keys: Sequence[str], open_file: Callable[[str], IO[bytes]], is_cut: bool = False
) -> Iterator[bytes]:
    """Yield one JSON line per document, without a byte-order mark: a whole file, or with ``is_cut`` a part of it."""
    for path in paths:
        with open_file(path) as file:
            text = _decode(file.read()).removeprefix("\ufeff")
        for document in cut_text(text) if is_cut else (text,):
            yield _line({keys[0]: document})


def cut_text(text: str) -> Iterator[str]:
    """Cut a text into up to `NUM_TEXT_DOCUMENTS` documents of similar length.

    A document ends at a blank line; where its length passes the intended length by half without a blank line, at the
    end of a line, else at white space, else anywhere.
    """
    length = max(-(-len(text) // NUM_TEXT_DOCUMENTS), _LEAST_DOCUMENT_LENGTH)
    begin, number = 0, 0
    while begin < len(text):
        number += 1
        wanted = length * number
        latest = min(wanted + length // 2, len(text))
        ends = (pattern.search(text, wanted - 1, latest) for pattern in _ENDS)
        end = next((found.end() for found in ends if found), wanted) if latest < len(text) else len(text)
        yield text[begin:end]
        begin = end


def read_tar(stream: IO[bytes], keys: Sequence[str]) -> Iterator[bytes]:
    """Yield one JSON line per sample: consecutive members whose names are equal up to the first dot.

    A key is the suffix of a member or a key in the sample's ``.json``. ``text`` may also be its ``.txt`` or ``.md``.

    Raises:
        tarfile.TarError: the archive is damaged or truncated.
    """
    with tarfile.open(fileobj=stream, mode="r|") as archive:
        members = (member for member in _each_member(archive) if member.isfile())
        for _, group in itertools.groupby(members, lambda member: _sample_name(member.name)):
            sample: dict[str, bytes] = {}
            for member in group:
                content = archive.extractfile(member)
                assert content is not None  # of a file
                sample[posixpath.basename(member.name).partition(".")[2]] = content.read()
            yield _line(_sample_values(sample, keys))
        # An archive ends with empty blocks, of which the first was read. The package does not require them.
        if archive.fileobj is not None and archive.fileobj.tell() == archive.offset:
            raise tarfile.ReadError("it is truncated; copy it again")


def _each_member(archive: tarfile.TarFile) -> Iterator[tarfile.TarInfo]:
    """Yield the members of an archive, without the archive's list of all members, which would grow in memory."""
    while (member := archive.next()) is not None:
        archive.members.clear()  # type: ignore[attr-defined]
        yield member


def read_table(path: str, kind: str, keys: Sequence[str]) -> Iterator[bytes]:
    """Yield one JSON line per row of a Parquet or Arrow file. A null value becomes an empty text.

    Raises:
        DataError: pyarrow or a column is missing, or the file is damaged.
    """
    arrow = load_pyarrow(path)
    try:
        for batch in _parquet_batches(path, keys) if kind == "parquet" else _arrow_batches(arrow, path, keys):
            for row in batch.to_pylist():
                yield _line({key: _text(value) for key, value in row.items()})
    except arrow.ArrowException as error:
        raise DataError(f"{path} cannot be read as {kind}: {error}") from error


def load_pyarrow(path: str) -> Any:
    """Import pyarrow.

    Raises:
        DataError: the package cannot be imported.
    """
    try:
        return importlib.import_module("pyarrow")
    except (ImportError, OSError) as error:
        raise DataError(
            f"{path}: reading Parquet and Arrow files needs the package pyarrow, which cannot be imported ({error}); "
            "install it with: pip install pyarrow"
        ) from error


def _parquet_batches(path: str, keys: Sequence[str]) -> Iterator[Any]:
    parquet = importlib.import_module("pyarrow.parquet")
    # With ``pre_buffer``, all columns of a file would stay in memory until its end.
    with parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
        _check_columns(path, file.schema_arrow.names, keys)
        yield from file.iter_batches(_ROWS, columns=list(keys), use_threads=False)


def _arrow_batches(arrow: Any, path: str, keys: Sequence[str]) -> Iterator[Any]:
    with arrow.memory_map(path) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        reader = arrow.ipc.open_file(source) if is_file else arrow.ipc.open_stream(source)
        _check_columns(path, reader.schema.names, keys)
        batches = map(reader.get_batch, range(reader.num_record_batches)) if is_file else reader
        for batch in batches:
            chosen = batch.select(list(keys))
            yield from (chosen.slice(begin, _ROWS) for begin in range(0, len(chosen), _ROWS))


def _check_columns(path: str, names: Sequence[str], keys: Sequence[str]) -> None:
    for key in keys:
        if key not in names:
            raise DataError(f"{path}: no column {key!r} (found: {', '.join(names)}); change --json-keys")


def _sample_name(path: str) -> str:
    folder, name = posixpath.split(path)
    return posixpath.join(folder, name.partition(".")[0])


def _sample_values(sample: dict[str, bytes], keys: Sequence[str]) -> dict[str, Any]:
    """Return the value of each key of a sample; if one is missing, all names of the sample for the error message."""
    try:
        described = json.loads(sample.get("json", b"{}"))
    except ValueError:
        described = {}
    values: dict[str, Any] = {name: _decode(content) for name, content in sample.items()}
    values = described | values
    text = next((values[name] for name in ("text", *_TEXT_MEMBERS) if name in values), None)
    values |= {} if text is None else {"text": text}
    return {key: values[key] for key in keys} if set(keys) <= set(values) else dict.fromkeys(values, "")


def _text(value: Any) -> Any:
    if isinstance(value, list):
        return [_text(part) for part in value]
    return "" if value is None else _decode(value) if isinstance(value, bytes) else value


def _decode(content: bytes) -> str:
    """Decode UTF-8 and preserve invalid bytes, so that the parser rejects the line."""
    return content.decode("utf-8", "surrogateescape")


def _line(values: dict[str, Any]) -> bytes:
    return json.dumps(values, ensure_ascii=False, default=str).encode("utf-8", "surrogateescape") + b"\n"


STDIN: Final = "-"
"""The path that denotes standard input."""
_STREAM_BYTES = 1 << 20


@dataclass(frozen=True)
class InputFile:
    """One input with its size on disk (0 for standard input) and modification time, which detect changes.

    Attributes:
        kind: its format, one of `KINDS`.
        compression: its compression, or None.
        begin: start offset of its text.
        keys: JSON keys for the texts of formats other than JSONL.
        members: text files, each of which is a document; the first is ``path``. Empty for other formats.
        is_cut: whether the text of the only member is cut into documents.
    """

    path: str
    num_bytes: int
    modified_ns: int
    kind: str = "jsonl"
    compression: str | None = None
    begin: int = 0
    keys: tuple[str, ...] = ()
    members: tuple[str, ...] = ()
    is_cut: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether the text supports random access: an uncompressed JSONL file."""
        return self.path != STDIN and self.kind == "jsonl" and self.compression is None

    @property
    def name(self) -> str:
        """Name in messages."""
        return "standard input" if self.path == STDIN else self.path

    def line_name(self, line: int) -> str:
        """Return the name of a line or document, counted from 0."""
        if self.is_cut:
            return self.name
        return self.members[line] if self.members else f"{self.name}:{line + 1}"

    def identity(self) -> list[Any]:
        """Return JSON values that stay the same as long as the input file is unchanged."""
        plain: list[Any] = [self.path, self.num_bytes, self.modified_ns]
        names = zlib.crc32("\0".join(self.members).encode("utf-8", "surrogateescape"))
        return plain if self.kind == "jsonl" else [*plain, self.kind, len(self.members), names]


def find_input(patterns: Sequence[str], keys: Sequence[str] = ("text",), kind: str | None = None) -> list[InputFile]:
    """List the files of paths, folders and glob patterns, in order; the files of one folder or pattern are sorted.

    ``kind`` is the format of all files. Without it, the format of each file is detected. A text file is a document. If
    it is the only file, it is cut into documents.

    Raises:
        DataError: a pattern matches nothing, or the format of a file is not supported.
    """
    files: list[InputFile] = []
    for pattern in patterns:
        if pattern == STDIN:
            if kind not in (None, "jsonl"):
                raise DataError(
                    f"--input - is read as jsonl, but --input-format is {kind}; pass files, or omit --input-format"
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
            raise DataError(f"{file.path} is a text file, but --json-keys has {len(keys)} keys; pass one key")
    if len(files) == 1 and len(files[0].members) == 1:
        return [replace(files[0], is_cut=True)]
    return files


def _files_of_folder(folder: str, kind: str | None) -> list[str]:
    """List the files of a folder, recursively, or the parts of a data set saved by Hugging Face's datasets.

    Text files in a folder of data files, such as a README.md next to Parquet files, are skipped.

    Raises:
        DataError: the folder holds no readable files, or several splits.
    """
    entries = set(os.listdir(folder))
    if "dataset_dict.json" in entries:
        splits = sorted(name for name in entries if os.path.isdir(os.path.join(folder, name)))
        raise DataError(f"{folder} contains the splits {', '.join(splits)}; select one: --input {folder}/{splits[0]}")
    if "state.json" in entries:
        return [os.path.join(folder, name) for name in _saved_parts(os.path.join(folder, "state.json"))]
    everything = _files_below(folder)
    found = [path for path in everything if kind is not None or has_known_suffix(path)]
    if found and len(found) < len(everything):
        others = [path for path in everything if not has_known_suffix(path)]
        named = ", ".join(others[:3]) + (", …" if len(others) > 3 else "")
        print(
            f"Skipping {len(others)} files of {folder} of unknown format ({named}): pass them in --input, or set "
            "--input-format",
            flush=True,
        )
    if not found:
        raise DataError(f"{folder} contains no file of a known format (.jsonl, .txt, …); change --input")
    if kind is None:
        data = [path for path in found if detect_format(path).kind != "text"]
        if 0 < len(data) < len(found):
            print(f"Skipping {len(found) - len(data)} text files next to the data files in {folder}", flush=True)
            found = data
    return found


def _files_below(folder: str) -> list[str]:
    """List the files of a folder recursively, sorted. Follow links, visit each folder once, and skip hidden files."""
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
            f"{path} is not the state.json of a saved Hugging Face data set ({error!r}); pass the data files instead"
        ) from error
    if not names:
        raise DataError(f"{path} lists no data files; change --input")
    return names


def _add(files: list[InputFile], path: str, found: FileFormat, keys: tuple[str, ...]) -> None:
    """Append a file. Consecutive text files become one input, because each may be small."""
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
    """JSONL stream that is read sequentially, and the file that it comes from."""

    text: IO[bytes]
    source: IO[bytes] | None

    def source_position(self, text_position: int) -> int:
        """Return the bytes on disk that were read for this position in the text."""
        return text_position if self.source is None else self.source.tell()

    def close(self) -> None:
        """Close the text and the file."""
        self.text.close()
        if self.source is not None:
            self.source.close()


def open_stream(file: InputFile) -> TextStream:
    """Open compressed JSONL, standard input, or a file of another format as a JSONL stream."""
    if file.path == STDIN:
        _skip_mark(sys.stdin.buffer)
        return TextStream(sys.stdin.buffer, None)
    if file.kind in ("parquet", "arrow"):
        return TextStream(_as_stream(read_table(file.path, file.kind, file.keys)), None)
    if file.kind == "text":
        lines = read_texts(file.members, file.keys, lambda path: _open(path, file.compression)[0], file.is_cut)
        return TextStream(_as_stream(lines), None)
    text, source = _open(file.path, file.compression)
    if file.kind == "tar":
        return TextStream(_as_stream(read_tar(text, file.keys)), source)
    if file.kind == "json":
        return TextStream(_as_stream(array_lines(text, file.name)), source)
    _skip_mark(text)
    return TextStream(text, source)


def _as_stream(lines: Iterator[bytes]) -> io.BufferedReader:
    return io.BufferedReader(LineStream(lines), _STREAM_BYTES)


def _open(path: str, compression: str | None) -> tuple[io.BufferedReader, IO[bytes]]:
    """Return the decompressed stream of a file, and the file."""
    source = open(path, "rb", buffering=0)  # noqa: SIM115 - closed with the stream
    if compression is None:
        plain: Any = io.BufferedReader(source, _STREAM_BYTES)
        return plain, plain
    if compression == "zst":
        reader = _load_zstandard(path).ZstdDecompressor().stream_reader(source, read_across_frames=True)
    else:
        opened: dict[str, Callable[[IO[bytes]], Any]] = {"gz": gzip.open, "xz": lzma.open, "bz2": bz2.open}
        reader = opened[compression](source)
    return io.BufferedReader(reader, _STREAM_BYTES), source


def _skip_mark(text: Any) -> None:
    if text.peek(len(BYTE_ORDER_MARK)).startswith(BYTE_ORDER_MARK):
        text.read(len(BYTE_ORDER_MARK))


def reading_errors() -> tuple[type[Exception], ...]:
    """Return the exception classes that reading damaged files may raise."""
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
