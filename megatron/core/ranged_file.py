"""Files and objects read by byte range, directly into their destination."""

from __future__ import annotations

import bisect
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from megatron.core.object_store import PART_BYTES, ObjectPath, ReadAheadFile
from megatron.core.safe_io import open_plain_file

_GAP_BYTES = 256 * 1024
"""Runs with a smaller gap are requested as one, because a request costs as much as reading this many bytes."""


class RangedFile(Protocol):
    """File that is read by byte range."""

    num_bytes: int

    def fill(self, data: memoryview, start: int) -> int:
        """Read into ``data`` from byte ``start`` on; return the number of bytes read, fewer at the end of the file.

        Raises:
            OSError: the file cannot be read.
        """
        ...

    def announce(self, first: int, run_bytes: int, starts: Iterable[int]) -> Iterable[int]:
        """Announce the next runs, each ``starts`` bytes after ``first``, for prefetching; return ``starts``."""
        ...

    def close(self) -> None:
        """Close the file."""


class LocalFile:
    """Local file, read unbuffered: only the requested bytes are read."""

    def __init__(self, path: Path) -> None:
        self._file = open_plain_file(path)
        self._descriptor = self._file.fileno()
        self.num_bytes = os.fstat(self._descriptor).st_size

    def fill(self, data: memoryview, start: int) -> int:
        """Read into ``data`` from byte ``start`` on."""
        received = 0
        while received < len(data):
            count = os.preadv(self._descriptor, [data[received:]], start + received)
            if not count:
                break
            received += count
        return received

    def announce(self, first: int, run_bytes: int, starts: Iterable[int]) -> Iterable[int]:
        """Do nothing: local reads need no prefetching."""
        return starts

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ObjectFile:
    """Object in a store; announced runs are fetched together, including short gaps between them.

    Other sequential reads, such as the tensors of a shard, use read-ahead.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._url, self._store = str(path), path.store
        self._ahead = ReadAheadFile(path)
        self.num_bytes = self._ahead.num_bytes
        self._windows: list[tuple[int, bytes]] = []

    def fill(self, data: memoryview, start: int) -> int:
        """Read into ``data`` from byte ``start`` on."""
        end = min(start + len(data), self.num_bytes)
        if end <= start:
            return 0
        found = self._announced(start, end)
        if found is None and end - start < PART_BYTES:
            found = memoryview(self._ahead.read(start, end - start))
        elif found is None:
            found = memoryview(self._store.read(self._url, start, end))
        data[: len(found)] = found
        return len(found)

    def announce(self, first: int, run_bytes: int, starts: Iterable[int]) -> Iterable[int]:
        """Fetch the runs in as few requests as is worthwhile."""
        starts = list(starts)
        self._windows = []
        if len(starts) > 1:
            ranges = list(_merged([first + start for start in starts], run_bytes, self.num_bytes))
            self._windows = [
                (begin, data)
                for (begin, _), data in zip(ranges, self._store.read_ranges(self._url, ranges), strict=True)
            ]
        return starts

    def close(self) -> None:
        """Discard the prefetched data."""
        self._windows = []

    def _announced(self, start: int, end: int) -> memoryview | None:
        place = bisect.bisect_right(self._windows, start, key=lambda window: window[0]) - 1
        if place < 0:
            return None
        begin, data = self._windows[place]
        return memoryview(data)[start - begin : end - begin] if end <= begin + len(data) else None


def open_ranged(path: Path) -> RangedFile:
    """Open a file or an object for reading by byte range.

    Raises:
        OSError: it does not exist, cannot be read, or is not a regular file.
    """
    return ObjectFile(path) if isinstance(path, ObjectPath) else LocalFile(path)


def read_range(file: RangedFile, start: int, num_bytes: int) -> bytes:
    """Return the bytes of a range, fewer if the file ends within it."""
    data = bytearray(min(num_bytes, max(file.num_bytes - start, 0)))
    return bytes(data[: file.fill(memoryview(data), start)])


def _merged(starts: Sequence[int], run_bytes: int, num_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges that cover the runs, with runs that are separated by short gaps merged."""
    begin = end = starts[0]
    for start in starts:
        if start - end > _GAP_BYTES:
            yield begin, end
            begin = start
        end = min(start + run_bytes, num_bytes)
    yield begin, end
