"""Tell from its name and its first bytes what a file holds."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from megatron.core.errors import DataError

KINDS: Final = ("jsonl", "text", "parquet", "arrow", "tar")
TEXT_KINDS: Final = ("jsonl", "text")
_NUM_BEGINNING_BYTES: Final = 16
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
    b"PK\x03\x04": "a zip archive (or an Office document); unpack it and give what is in it",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive; unpack it and give what is in it",
    b"Rar!": "a rar archive; unpack it and give what is in it",
    b"%PDF": "a PDF; write its text to a .txt file first",
    b"\x89HDF": "an HDF5 file; write its texts to Parquet or jsonl first",
    b"SQLite format 3": "an SQLite database; write its texts to Parquet or jsonl first",
    b"Obj\x01": "an Avro file; write it to Parquet or jsonl first",
    b"ORC": "an ORC file; write it to Parquet or jsonl first",
}
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
    """Name what a file holds, one of `KINDS`, how it is compressed, and the bytes before its text."""

    kind: str
    compression: str | None
    num_mark_bytes: int


def has_known_suffix(path: str) -> bool:
    """Return whether the name of a file says what it holds."""
    return _named(path)[0] is not None


def detect_format(path: str, wanted: str | None = None) -> FileFormat:
    """Return what a file holds: ``wanted``, or what its first bytes say, or its name; jsonl where neither does.

    Raises:
        DataError: it cannot be read, its encoding is not UTF-8, or it is of a kind that is not read.
    """
    try:
        with open(path, "rb", buffering=0) as file:
            beginning = file.read(_NUM_BEGINNING_BYTES)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    kind, compression = _named(path)
    compression = compression or _begins(beginning, _COMPRESSED_BEGINNINGS)
    if compression is None:
        kind = _begins(beginning, _KIND_BEGINNINGS) or kind
    kind = wanted or kind or "jsonl"
    if kind in TEXT_KINDS and compression is None:
        _check_encoding(path, beginning)
        foreign = _begins(beginning, _FOREIGN_BEGINNINGS)
        if foreign is not None:
            raise DataError(f"{path} is {foreign}")
    mark = len(BYTE_ORDER_MARK) if compression is None and beginning.startswith(BYTE_ORDER_MARK) else 0
    return FileFormat(kind, compression, mark)


def advice(line: bytes) -> str | None:
    """Say how a line that is no JSON object can be read after all; None where it was meant to be one."""
    try:
        line.decode("utf-8")
    except UnicodeDecodeError as error:
        return (
            f"0x{line[error.start]:02x} is not UTF-8, as in Latin-1 or Windows-1252: convert the file with "
            "iconv -f WINDOWS-1252 -t UTF-8 FILE > NEW"
        )
    if line.lstrip().startswith(b"["):
        return "one JSON array becomes lines with: jq -c '.[]' FILE > NEW"
    if line.lstrip().startswith((b"{", b'"')):
        return None
    return "is it plain text? Read it as one document a file with --input-format text"


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
            f"{path} is encoded in {encoding}, UTF-8 is expected; convert it: iconv -f {encoding} -t UTF-8 {path} > NEW"
        )
