"""A part of a file, read as if it were a file."""

from __future__ import annotations

import io
import os
from typing import BinaryIO


class FileSection(io.RawIOBase):
    """Read a part of an open file as if it were a file.

    Raises:
        ValueError: the file ends within the part.
    """

    def __init__(self, file: BinaryIO, start: int, num_bytes: int) -> None:
        super().__init__()
        self._file, self._start, self._num_bytes, self._position = file, start, num_bytes, 0
        size = os.fstat(file.fileno()).st_size
        if start < 0 or num_bytes < 0 or start + num_bytes > size:
            raise ValueError(f"it has {size} bytes, and {num_bytes} at {start} are asked for")

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte of the part and return which."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._num_bytes}[whence]
        if base + offset < 0:
            raise ValueError(f"there is no byte {base + offset}")
        self._position = base + offset
        return self._position

    def tell(self) -> int:
        """Return the byte of the part that is read next."""
        return self._position

    def read(self, size: int = -1) -> bytes:
        """Return the next bytes; fewer at the end of the part."""
        rest = max(self._num_bytes - self._position, 0)
        self._file.seek(self._start + self._position)
        data = self._file.read(rest if size is None or size < 0 else min(size, rest))
        self._position += len(data)
        return data
