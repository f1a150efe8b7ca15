"""An object that is read in many small ranges: whoever reads on gets more at a time, whoever jumps little."""

from __future__ import annotations

import threading
from collections import OrderedDict

from megatron.core.files.object_path import ObjectPath

_FIRST_BYTES = 128 * 1024
_MOST_BYTES = 8 << 20
_NUM_WINDOWS = 8


class ReadAheadFile:
    """Read ranges of an object from a few windows of it that are kept; a context for several threads.

    A range outside all windows is read with what follows it: 128 KiB of it after a jump, twice as much as before where
    it goes on from a window, 8 MiB at most.
    """

    def __init__(self, path: ObjectPath) -> None:
        self._path = path
        self.num_bytes = path.store.size(str(path))
        self._windows: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, start: int, num_bytes: int) -> bytes:
        """Return the bytes of a range, fewer where the object ends within it.

        Raises:
            ObjectStoreError: the object cannot be read.
        """
        end = min(start + num_bytes, self.num_bytes)
        if end <= start:
            return b""
        with self._lock:
            ahead = _FIRST_BYTES
            for begin, window in self._windows.items():
                if begin <= start and end <= begin + len(window):
                    self._windows.move_to_end(begin)
                    return window[start - begin : end - begin]
                if begin <= start <= begin + len(window):
                    ahead = max(ahead, min(2 * len(window), _MOST_BYTES))
        # Not under the lock: threads that read different places wait for the store at the same time.
        window = self._path.store.read(str(self._path), start, min(max(end, start + ahead), self.num_bytes))
        with self._lock:
            self._windows[start] = window
            self._windows.move_to_end(start)
            while len(self._windows) > _NUM_WINDOWS:
                self._windows.popitem(last=False)
        return window[: end - start]
