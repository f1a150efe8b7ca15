"""Cache index arrays in files whose names hash all inputs of the arrays.

`CacheMirror` shares the cache of each node with the other nodes through an object store.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tokenize import TokenError
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.object_store import ObjectPath, UploadedFile, as_path, fetch, machine_cache

_CHUNK_BYTES = 16 << 20


class CacheMirror:
    """Mirror of index files in a folder of an object store. The description file is uploaded last.

    Errors are reported in one line: every node builds an index that cannot be shared.
    """

    def __init__(self, folder: ObjectPath, copies: Path, report: Callable[[str], None]) -> None:
        self._folder = folder
        self._copies = copies
        self._report = report

    def fetch(self, described: Path, files: Mapping[str, Path]) -> Path | None:
        """Download the files of an index to a local folder and return it; None if the store has no such index."""
        objects = [self._folder / path.name for path in (described, *files.values())]
        try:
            return fetch(objects, self._copies)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report(f"WARNING: index cache {self._folder} cannot be read ({error}); building the index")
            return None

    def put(self, described: Path, files: Mapping[str, Path]) -> None:
        """Upload the files of an index to the store."""
        try:
            for path in (*files.values(), described):
                target = self._folder / path.name
                target.retry(lambda path=path, target=target: _upload(path, target))  # type: ignore[misc]
        except OSError as error:
            self._report(f"WARNING: index cache {self._folder} cannot be written ({error}); every node builds its own")


def _upload(path: Path, target: ObjectPath) -> None:
    with open(path, "rb") as source, UploadedFile(target, path.stat().st_size) as file:
        while chunk := source.read(_CHUNK_BYTES):
            file.append(chunk)


Arrays = Mapping[str, NDArray[Any]]

FORMAT_VERSION: Final = 1
"""Part of every cache key. Increment it when the same description gives different arrays."""

_ABANDONED_AFTER_S: Final = 3600.0
"""Age without writes after which a temporary file is assumed to be left from a killed process."""

_UNREADABLE: Final = (OSError, ValueError, EOFError, TypeError, OverflowError, MemoryError, SyntaxError, TokenError)
"""Exceptions that reading a damaged .npy file may raise."""


class IndexArrays:
    """The ``arrays`` of one index. Arrays in files are pickled as file names, not as data.

    ``written_s`` has the seconds that writing each new array took, and is empty for an index that was found.
    ``opened_s`` is the time to open the files.
    """

    def __init__(
        self,
        arrays: Arrays,
        files: Mapping[str, Path] | None = None,
        *,
        written_s: Mapping[str, float] | None = None,
        opened_s: float = 0.0,
    ) -> None:
        self.arrays = dict(arrays)
        self._files = None if files is None else dict(files)
        self.written_s, self.opened_s = dict(written_s or {}), opened_s

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    @property
    def files(self) -> Mapping[str, Path]:
        """Return the files of the arrays by name; empty for an index in memory."""
        return self._files or {}

    @property
    def source(self) -> str:
        """Describe the location of the index for a message."""
        if self._files is None:
            return "index in memory"
        return f"index cache {next(iter(self._files.values())).parent}"

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"arrays": self.arrays if self._files is None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        if self._files is not None:
            self.arrays = {name: _load(path) for name, path in self._files.items()}


class IndexCache:
    """Cache of index arrays, keyed by a hash of their inputs.

    Any number of processes on any number of nodes may share a folder without locks. Each process writes to temporary
    names and renames, so a file under its final name is always complete. A later rename replaces equal content.

    With ``folder`` None, nothing is written to disk. A folder in an object store is shared by all nodes, each of which
    also has a local cache. ``report`` is called with one line for a cache that cannot be used.
    """

    def __init__(self, folder: str | Path | None, report: Callable[[str], None]) -> None:
        self.folder = None if folder is None else as_path(folder)
        self._report = report
        self._mirror: CacheMirror | None = None
        if isinstance(self.folder, ObjectPath):
            copies = machine_cache()
            self._mirror = CacheMirror(self.folder, copies, report)
            self.folder = copies / "GPTDataset_indices"

    def load_or_build(
        self,
        kind: str,
        names: Sequence[str],
        description: Mapping[str, Any],
        build: Callable[[], Arrays],
        find_damage: Callable[[Arrays], str | None],
    ) -> IndexArrays:
        """Return the arrays for ``description``, from the cache or newly built.

        File names consist of the hash, ``kind``, such as ``GPTDataset-train``, and one of ``names``. ``find_damage``
        describes the damage of arrays that were read, or returns None. Damaged arrays are rebuilt.
        """
        if self.folder is None:
            return _in_memory(build())
        text = json.dumps({"kind": kind, "format": FORMAT_VERSION, **description}, indent=4, sort_keys=True)
        stem = f"{_md5(text)}-{kind}"
        files = {name: self.folder / f"{stem}-{name}.npy" for name in names}
        described = self.folder / f"{stem}-description.txt"
        found = self._read(described, files, text, find_damage)
        if found is None and self._mirror is not None:
            copies = self._mirror.fetch(described, files)
            if copies is not None:
                fetched = {name: copies / path.name for name, path in files.items()}
                found = self._read(copies / described.name, fetched, text, find_damage)
        if found is not None:
            return found
        built = self._publish(described, files, text, build())
        if self._mirror is not None and built.files:
            self._mirror.put(described, files)
        return built

    def remember(self, kind: str, key: Mapping[str, Any], compute: Callable[[], str]) -> str:
        """Return the cached result of ``compute`` for this key.

        Without a readable cache entry, the text is computed and cached if possible.
        """
        if self.folder is None:
            return compute()
        name = json.dumps(key, sort_keys=True)
        path = self.folder / f"{_md5(name)}-{kind}.txt"
        with contextlib.suppress(OSError, ValueError):
            text, check = path.read_text().split()
            if check == _md5(name + text):
                return text
        text = compute()
        with contextlib.suppress(OSError):  # `_publish` reports a folder that cannot be written
            self.folder.mkdir(parents=True, exist_ok=True)
            _replace(path, lambda file: file.write(f"{text} {_md5(name + text)}\n".encode()))
        return text

    def _read(
        self,
        described: Path,
        files: Mapping[str, Path],
        text: str,
        find_damage: Callable[[Arrays], str | None],
    ) -> IndexArrays | None:
        """Read the arrays; None if a file is missing (not reported) or damaged (reported)."""
        try:
            if described.read_text() != text:
                raise ValueError("its description does not match its file name")
            arrays = _open(files)
            damage = find_damage(arrays.arrays)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except _UNREADABLE as error:
            damage = str(error).splitlines()[0] if str(error) else type(error).__name__
        if damage is None:
            return arrays
        self._report(f"WARNING: index cache {described} cannot be used ({damage}); rebuilding it")
        return None

    def _publish(self, described: Path, files: Mapping[str, Path], text: str, arrays: Arrays) -> IndexArrays:
        """Write the arrays, then the description, which makes them a cache hit; keep them in memory on failure."""
        try:
            described.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(described.parent)
            written_s = {}
            for name, path in files.items():
                start = time.perf_counter()
                _replace(path, functools.partial(np.save, arr=arrays[name], allow_pickle=False))
                written_s[name] = time.perf_counter() - start
            _replace(described, lambda file: file.write(text.encode()))
            return _open(files, written_s)
        except (OSError, ValueError) as error:
            self._report(
                f"WARNING: index cache {described.parent} cannot be written ({error}), so every process keeps its own "
                "index in memory; set --data-cache-path to a writable folder"
            )
            return _in_memory(arrays)


def find_damage(arrays: Arrays, expected: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> str | None:
    """Describe the first array with a wrong shape or dtype; None if all are as expected."""
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
            return f"{name} has shape {array.shape} and dtype {array.dtype}, expected {shape} and {dtype}"
    return None


def _in_memory(arrays: Arrays) -> IndexArrays:
    return IndexArrays(arrays, written_s=dict.fromkeys(arrays, 0.0))


def _open(files: Mapping[str, Path], written_s: Mapping[str, float] | None = None) -> IndexArrays:
    start = time.perf_counter()
    arrays = {name: _load(path) for name, path in files.items()}
    return IndexArrays(arrays, files, written_s=written_s, opened_s=time.perf_counter() - start)


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another process may remove it, or own it
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                path.unlink()


def _load(path: Path) -> NDArray[Any]:
    """Memory-map an array as a plain ndarray, because reading single elements of a ``memmap`` is slow."""
    mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    return mapped.view(np.ndarray)


def _replace(path: Path, write: Callable[[Any], object]) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")
    try:
        with open(temporary, "xb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
