"""A cheap look at a data set: its header and file sizes, never its data."""

from __future__ import annotations

import dataclasses
import os
import struct

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_TOKEN_BYTES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


@dataclasses.dataclass(frozen=True)
class IndexHeader:
    """Hold what the first bytes of an index file say."""

    num_sequences: int
    num_documents: int


class DamagedIndexError(Exception):
    """Report in one line why a data set cannot be used."""


def read_index_header(prefix: str) -> IndexHeader:
    """Read the header of ``PREFIX.idx`` and compare both files' sizes with what it says.

    Raises:
        DamagedIndexError: if a file is missing, cut short or of another format.
    """
    index_path, data_path = prefix + ".idx", prefix + ".bin"
    for path in (index_path, data_path):
        if not os.path.isfile(path):
            raise DamagedIndexError(f"{path} does not exist; give the prefix of PREFIX.bin and PREFIX.idx")
    try:
        with open(index_path, "rb") as file:
            return _check_files(file.read(_HEADER.size), index_path, data_path)
    except OSError as error:
        raise DamagedIndexError(f"{index_path} cannot be read ({error.strerror})") from error


def _check_files(header: bytes, index_path: str, data_path: str) -> IndexHeader:
    index_bytes = os.path.getsize(index_path)
    if len(header) < _HEADER.size:
        raise DamagedIndexError(
            f"{index_path} has {index_bytes} bytes and is cut short: the header alone has {_HEADER.size}; make it again"
        )
    magic, version, code, num_sequences, num_document_indices = _HEADER.unpack(header)
    if magic != _MAGIC or version != 1 or code not in _TOKEN_BYTES:
        raise DamagedIndexError(f"{index_path} is not an index file (MMIDIDX, version 1); make it again")
    # i32 lengths, i64 pointers and i64 document indices; one i8 mode a sequence may follow
    expected = _HEADER.size + 12 * num_sequences + 8 * num_document_indices
    if index_bytes not in (expected, expected + num_sequences):
        raise DamagedIndexError(
            f"{index_path} has {index_bytes} bytes where {expected} are expected for {num_sequences} "
            "sequences; it is cut short or damaged, make it again"
        )
    data_bytes = os.path.getsize(data_path)
    needed = _needed_data_bytes(index_path, num_sequences, _TOKEN_BYTES[code])
    if data_bytes < needed:
        raise DamagedIndexError(
            f"{data_path} has {data_bytes} bytes where its index needs {needed}; it is cut short, make it again"
        )
    return IndexHeader(num_sequences, max(num_document_indices - 1, 0))


def _needed_data_bytes(index_path: str, num_sequences: int, token_bytes: int) -> int:
    """Return where the last sequence ends, from its length and pointer."""
    if num_sequences == 0:
        return 0
    with open(index_path, "rb") as file:
        file.seek(_HEADER.size + 4 * (num_sequences - 1))
        (length,) = struct.unpack("<i", file.read(4))
        file.seek(_HEADER.size + 4 * num_sequences + 8 * (num_sequences - 1))
        (pointer,) = struct.unpack("<q", file.read(8))
    return int(pointer + length * token_bytes)
