"""Files that are looked at again and again, and read where they have changed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

Content = TypeVar("Content")

_MOST_KEPT = 256


class FilesRead(Generic[Content]):
    """Keep what ``read`` makes of files; one is read again where its size or one of its times is another."""

    def __init__(self, read: Callable[[Path], Content]) -> None:
        self._read = read
        self._known: dict[Path, tuple[tuple[int, int, int], Content]] = {}

    def of(self, path: Path) -> Content:
        """Return what a file holds now.

        Raises:
            OSError: the system does not say when it was changed.
        """
        status = path.stat()
        # The time of a change of its rights too: what could not be read may be readable.
        mark = (status.st_mtime_ns, status.st_ctime_ns, status.st_size)
        known = self._known.get(path)
        if known is None or known[0] != mark:
            if len(self._known) >= _MOST_KEPT:
                self._known.clear()
            known = self._known[path] = (mark, self._read(path))
        return known[1]
