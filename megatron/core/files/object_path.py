"""Paths of objects: a URL such as s3://bucket/run as a Path, so that what reads and writes checkpoints takes both."""

from __future__ import annotations

import fnmatch
import importlib.util
import os
import re
import stat
from collections.abc import Callable, Iterator
from pathlib import Path, PosixPath
from typing import Any, NoReturn, TypeVar

from megatron.core.errors import StorageError
from megatron.core.files.object_store import PACKAGES, ObjectStore, missing_package, open_store

_ALMOST = re.compile(rf"({'|'.join(PACKAGES)}):/?(?!/)", re.IGNORECASE)
_ON_DISK = ("file", "memory")
Result = TypeVar("Result")


class ObjectPath(PosixPath):
    """Name an object, or a folder of objects, by its URL.

    It offers what checkpoints and data need of a Path. A folder is there where something is below it; making one does
    nothing. Whatever needs a local file (`open`, `os` and `shutil`) is refused.

    Raises:
        StorageError: it is used as a local path.
    """

    def __str__(self) -> str:
        """Return the URL."""
        scheme, *names = self.parts
        return f"{scheme}//{'/' if scheme == 'file:' else ''}{'/'.join(names)}"

    def __repr__(self) -> str:
        """Return the URL as Python would show it."""
        return f"ObjectPath({str(self)!r})"

    def __fspath__(self) -> NoReturn:
        """Refuse to be a local path."""
        raise StorageError(f"{self} is in an object store, and a local file or folder is needed here")

    @property
    def store(self) -> ObjectStore:
        """Return the store that the object is in."""
        return open_store(str(self))

    def retry(self, action: Callable[[], Result]) -> Result:
        """Return what an action on this object returns, as `ObjectStore.attempt` does."""
        return self.store.attempt(str(self), action)

    def create(self, data: bytes) -> None:
        """Write the object, which must not be there yet; see `ObjectStore.create`."""
        self.store.create(str(self), data)

    def write_bytes(self, data: Any) -> int:
        """Write the object as a whole; a reader sees all of it, or what was there before."""
        self.store.put(str(self), bytes(data))
        return len(data)

    def read_bytes(self) -> bytes:
        """Return the object."""
        store = self.store
        return store.read(str(self), 0, store.size(str(self)))

    def read_text(self, encoding: str | None = None, errors: str | None = None, *_: Any, **__: Any) -> str:
        """Return the object as text."""
        return self.read_bytes().decode(encoding or "utf-8", errors or "strict")

    def iterdir(self) -> Iterator[ObjectPath]:  # type: ignore[override]
        """Yield what is directly below, by name."""
        for entry in self.store.entries(str(self)):
            yield self / entry.name

    def glob(self, pattern: str, **_: Any) -> Iterator[ObjectPath]:  # type: ignore[override]
        """Yield what is directly below and has a name that the pattern, of one level, stands for."""
        if not any(sign in pattern for sign in "*?["):
            yield from (path for path in (self / pattern,) if path.exists())
            return
        yield from (path for path in self.iterdir() if fnmatch.fnmatchcase(path.name, pattern))

    def rglob(self, pattern: str, **_: Any) -> NoReturn:
        """Refuse: nothing here looks deeper than one level."""
        self.__fspath__()

    def stat(self, **_: Any) -> os.stat_result:
        """Return the size of the object and when it was written."""
        size, seconds = self.store.size(str(self)), self.store.modified(str(self))
        kept = {"st_mtime": seconds, "st_mtime_ns": round(seconds * 1e9)}
        return os.stat_result((stat.S_IFREG, 0, 0, 1, 0, 0, size, 0, int(seconds), 0), kept)

    def exists(self, **_: Any) -> bool:
        """Return whether there is an object of this name, or anything below it."""
        return self.is_file() or self.is_dir()

    def is_file(self, **_: Any) -> bool:
        """Return whether there is an object of this name."""
        try:
            self.store.size(str(self))
        except FileNotFoundError:
            return False
        return True

    def is_dir(self, **_: Any) -> bool:
        """Return whether there is anything below this name."""
        return self.store.is_folder(str(self))

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Do nothing: a folder is there as soon as something is in it."""

    def touch(self, *_: Any, **__: Any) -> None:
        """Write an empty object."""
        self.write_bytes(b"")

    def unlink(self, missing_ok: bool = False) -> None:
        """Delete the object; one that is not there is no error."""
        self.store.delete(str(self))

    def remove_folder(self) -> None:
        """Delete everything below this name."""
        self.store.delete_folder(str(self))

    def resolve(self, strict: bool = False) -> ObjectPath:
        """Return the path itself."""
        return self

    def absolute(self) -> ObjectPath:
        """Return the path itself."""
        return self


def is_url(text: str) -> bool:
    """Return whether a text names something in an object store, or tries to."""
    return "://" in text


def as_path(value: str | Path) -> Path:
    """Return the path that a text names: of an object for a URL, else a local one.

    Raises:
        StorageError: it is a URL that cannot be used.
    """
    if isinstance(value, ObjectPath):
        return value
    text = str(value)
    if not is_url(text):
        return Path(value)
    problem = url_problem(text)
    if problem is not None:
        raise StorageError(problem)
    return ObjectPath(text)


def url_problem(text: str) -> str | None:
    """Return what is wrong with a URL, without repeating what may be a credential; None where it can be used.

    A local path is no problem, unless it looks like a URL that lacks a slash.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        return f"{text} lacks a slash; write {text.partition(':')[0].lower()}://" if _ALMOST.match(text) else None
    if scheme not in PACKAGES:
        return f"{scheme[:20]}:// is not a store that can be used; those are s3://, gs:// and az://"
    place = rest.partition("/")[0]
    if "@" in place or ":" in place:
        return f"{scheme}://*** holds a credential or a port; give those to {PACKAGES[scheme]} by its environment"
    if set(rest) & set("?#*[]\\") or not rest.isprintable():
        return f"{scheme}://{place}/... holds one of ? # * [ ] \\, or what cannot be printed; give the name of a folder"
    if (not place and scheme not in _ON_DISK) or not rest.strip("/"):
        return f"{text} names no {'folder' if scheme in _ON_DISK else 'bucket'}; write {scheme}://BUCKET/FOLDER"
    if {".", ".."} & set(rest.split("/")):
        return f"{text} has a part . or .., which an object's name cannot have"
    if importlib.util.find_spec(PACKAGES[scheme]) is None:
        return missing_package(scheme)
    return None
