"""Write parts of a file at given offsets, past the page cache where that is possible."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

ALIGNMENT: Final = 4096
"""What the place and the size of a direct write are multiples of, in bytes."""

_DIRECT: Final[int] = getattr(os, "O_DIRECT", 0)  # Linux has it
_BUFFER_BYTES: Final = 2 << 20


def aligned_buffer() -> NDArray[np.uint8]:
    """Return memory for direct writes, which the files of one thread can share."""
    return np.frombuffer(mmap.mmap(-1, _BUFFER_BYTES), np.uint8)


class PlacedFile:
    """Write parts of a file that exists: with a ``buffer``, past the system's page cache where that can be done.

    The page cache would copy the bytes once more and keep the copy where nobody reads it; finding the memory for that
    can cost several times what the disk needs. Whole pages of the file are written directly, by way of the buffer; what
    a part has of its first and last page goes through the cache, since other parts have the rest of them.
    """

    def __init__(self, path: Path, buffer: NDArray[np.uint8] | None = None) -> None:
        self._buffer = np.empty(0, np.uint8) if buffer is None else buffer
        self._cached = os.open(path, os.O_WRONLY)
        self._direct = None if buffer is None else _open_direct(path)

    def write(self, data: memoryview, offset: int) -> None:
        """Write a part.

        Raises:
            OSError: it cannot be written.
        """
        to_page = -offset % ALIGNMENT
        num_direct = (len(data) - to_page) // ALIGNMENT * ALIGNMENT
        if self._direct is None or num_direct <= 0:
            return _write_all(self._cached, data, offset)
        _write_all(self._cached, data[:to_page], offset)
        begin, end = to_page, to_page + num_direct
        while begin < end and self._direct is not None:
            piece = self._buffer[: min(end - begin, len(self._buffer))]
            # NumPy lets other threads work while it copies.
            np.copyto(piece, np.frombuffer(data[begin : begin + len(piece)], np.uint8))
            begin += self._write_directly(self._direct, piece.data, offset + begin)
        return _write_all(self._cached, data[begin:], offset + begin)

    def _write_directly(self, descriptor: int, piece: memoryview, offset: int) -> int:
        """Return how much was written; nothing where the file system, or this place, only takes ordinary writes."""
        try:
            written = os.pwrite(descriptor, piece, offset)
        except OSError as failure:
            if failure.errno != errno.EINVAL:
                raise
            written = 0
        if written % ALIGNMENT or not written:
            os.close(descriptor)
            self._direct = None
        return written

    def close(self) -> None:
        """Let go of the file."""
        os.close(self._cached)
        if self._direct is not None:
            os.close(self._direct)


def _open_direct(path: Path) -> int | None:
    if not _DIRECT:
        return None
    try:
        return os.open(path, os.O_WRONLY | _DIRECT)
    except OSError as failure:
        if failure.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
        return None


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
