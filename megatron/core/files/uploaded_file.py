"""A new object of a store, appended to like a file on disk and there as a whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import zlib
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from megatron.core.files.object_path import ObjectPath


class UploadedFile:
    """Append to a new object, which appears on leaving the context without an error and is compared in size then.

    The package of the store sends parts as they fill up, so that no more than a few of them are in memory.
    """

    def __init__(self, path: ObjectPath, expected_bytes: int) -> None:
        self.num_bytes = 0
        self._path = path
        self._file = path.store.upload(str(path), expected_bytes)

    def __enter__(self) -> UploadedFile:
        """Return the file itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Finish the object; after an error give it up.

        Raises:
            OSError: the store has another number of bytes than were written.
        """
        if kind is not None:
            self._give_up()
            return
        self._file.close()
        found = self._path.store.size(str(self._path))
        if found != self.num_bytes:
            raise OSError(errno.EIO, f"the store has {found} of {self.num_bytes} bytes", str(self._path))

    def append(self, data: NDArray[np.uint8] | bytes) -> int:
        """Append the bytes and return their CRC-32."""
        view = memoryview(data) if isinstance(data, bytes) else data.data
        self._file.write(view)
        self.num_bytes += view.nbytes
        return zlib.crc32(view)

    def _give_up(self) -> None:
        """Leave no object and no parts, as far as the store lets us; closing would make an object of them."""
        with contextlib.suppress(Exception):
            self._file.discard()
        with contextlib.suppress(Exception):
            self._file.closed = True
