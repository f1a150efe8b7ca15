"""A store whose writer dies, or whose answers are lost, at a chosen operation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import fsspec

MEMORY = fsspec.get_filesystem_class("memory")
_CHANGES = ("pipe_file", "open", "rm_file", "rm")


class Killed(BaseException):
    """Stand for the end of a process: nothing catches it."""


class Unreachable(Exception):
    """Stand for an error of a package of its own, such as a lost connection."""


class ChangingOperations:
    """Count the operations that change what ``memory://`` holds; one of them may be the last."""

    def __init__(self, monkeypatch: Any, last: int | None = None) -> None:
        self.count = 0
        self._last = last
        for name in _CHANGES:
            real = getattr(MEMORY, name)
            monkeypatch.setattr(MEMORY, name, self._counted(real, name))

    def _counted(self, real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def operation(store: Any, path: Any, *words: Any, **named: Any) -> Any:
            mode = named.get("mode", words[0] if words and name == "open" else "")
            if name != "open" or "w" in mode or "x" in mode:
                if self.count == self._last:
                    raise Killed
                self.count += 1
            return real(store, path, *words, **named)

        return operation


@contextmanager
def empty_memory_store() -> Iterator[None]:
    """Give ``memory://`` with nothing in it, and leave it so."""
    store = fsspec.filesystem("memory")
    store.store.clear()
    store.pseudo_dirs[:] = [""]
    try:
        yield
    finally:
        store.store.clear()
        store.pseudo_dirs[:] = [""]
