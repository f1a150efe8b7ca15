"""Cache built index arrays in files whose names hash everything that their content depends on.

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
    """Fetch the files of an index from a folder of a store, and put new ones there, their description last.

    What goes wrong is said in a line: an index that cannot be shared is built by each machine.
    """

    def __init__(self, folder: ObjectPath, copies: Path, report: Callable[[str], None]) -> None:
        self._folder = folder
        self._copies = copies
        self._report = report

    def fetch(self, described: Path, files: Mapping[str, Path]) -> Path | None:
        """Return a folder of this machine with an index's files under their names; None where the store has none."""
        objects = [self._folder / path.name for path in (described, *files.values())]
        try:
            return fetch(objects, self._copies)
        except FileNotFoundError:
            return None
        except OSError as error:
            self._report(f"WARNING: index cache {self._folder} cannot be read ({error}); building the index")
            return None

    def put(self, described: Path, files: Mapping[str, Path]) -> None:
        """Copy an index's files into the store."""
        try:
            for path in (*files.values(), described):
                target = self._folder / path.name
                target.retry(lambda path=path, target=target: _upload(path, target))  # type: ignore[misc]
        except OSError as error:
            self._report(
                f"WARNING: index cache {self._folder} cannot be written ({error}); every machine builds its own"
            )


def _upload(path: Path, target: ObjectPath) -> None:
    with open(path, "rb") as source, UploadedFile(target, path.stat().st_size) as file:
        while chunk := source.read(_CHUNK_BYTES):
            file.append(chunk)


Arrays = Mapping[str, NDArray[Any]]

FORMAT_VERSION: Final = 1
"""Part of every key: raise it when the same description would give other arrays."""

_ABANDONED_AFTER_S: Final = 3600.0
"""Temporary files that nobody wrote to for so long were left by a process that was killed."""

_UNREADABLE: Final = (OSError, ValueError, EOFError, TypeError, OverflowError, MemoryError, SyntaxError, TokenError)
"""What reading a damaged .npy file may raise."""


class IndexArrays:
    """Hold the ``arrays`` of one index; those that lie in files are pickled as file names, not as data."""

    def __init__(self, arrays: Arrays, files: Mapping[str, Path] | None = None) -> None:
        self.arrays = dict(arrays)
        self._files = None if files is None else dict(files)

    def __getitem__(self, name: str) -> NDArray[Any]:
        return self.arrays[name]

    @property
    def files(self) -> Mapping[str, Path]:
        """Return the files of the arrays by name; none for an index in memory."""
        return self._files or {}

    @property
    def source(self) -> str:
        """Name the files for a message, or say that there are none."""
        if self._files is None:
            return "index in memory"
        return f"index cache {next(iter(self._files.values())).parent}"

    def __getstate__(self) -> dict[str, Any]:
        return {"_files": self._files, "arrays": self.arrays if self._files is None else None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._files = state["_files"]
        if self._files is None:
            self.arrays = state["arrays"]
        else:
            self.arrays = {name: _load(path) for name, path in self._files.items()}


class IndexCache:
    """Find index arrays by what they are made of, or build and publish them.

    Any number of processes, on any number of machines, may share a folder without locks: each writes under names of
    its own and renames, so a file under its final name is always whole; whoever renames last replaces equal content.

    ``folder`` None keeps nothing on disk; one of an object store is shared by all machines, each of which has its own
    beside it. ``report`` is called with one line for a cache that cannot be used.
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
        """Return the arrays that ``description`` stands for.

        ``kind`` follows the hash in the file names, as in ``GPTDataset-train``, then one of ``names``. ``find_damage``
        says in words what is wrong with arrays that were read, or returns None; wrong ones are built anew.
        """
        if self.folder is None:
            return IndexArrays(build())
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
        """Return the text that ``compute`` returned when it was last asked with this key.

        It is for what would take long to find out again. A text that cannot be kept or read is computed.
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
        with contextlib.suppress(OSError):  # `_publish` tells of a folder that cannot be written
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
        """Read the arrays; None if one of the files is not there (in silence) or not whole (reported)."""
        try:
            if described.read_text() != text:
                raise ValueError("its description is not the one that its name stands for")
            arrays = {name: _load(path) for name, path in files.items()}
            damage = find_damage(arrays)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except _UNREADABLE as error:
            damage = str(error).splitlines()[0] if str(error) else type(error).__name__
        if damage is None:
            return IndexArrays(arrays, files)
        self._report(f"WARNING: index cache {described} cannot be used ({damage}); building it again")
        return None

    def _publish(self, described: Path, files: Mapping[str, Path], text: str, arrays: Arrays) -> IndexArrays:
        """Write the arrays, then the description that makes them a hit; keep them in memory if that fails."""
        try:
            described.parent.mkdir(parents=True, exist_ok=True)
            _remove_abandoned(described.parent)
            for name, path in files.items():
                _replace(path, functools.partial(np.save, arr=arrays[name], allow_pickle=False))
            _replace(described, lambda file: file.write(text.encode()))
            return IndexArrays({name: _load(path) for name, path in files.items()}, files)
        except (OSError, ValueError) as error:
            self._report(
                f"WARNING: index cache {described.parent} cannot be written ({error}); every process keeps its own "
                "index in memory; give --data-cache-path a folder that can be written"
            )
            return IndexArrays(arrays)


def find_damage(arrays: Arrays, expected: Mapping[str, tuple[tuple[int, ...], np.dtype[Any]]]) -> str | None:
    """Name the array whose shape or dtype is wrong; None if none is."""
    for name, (shape, dtype) in expected.items():
        array = arrays[name]
        if array.shape != shape or array.dtype != dtype or not array.flags.c_contiguous:
            return f"{name} has shape {array.shape} and dtype {array.dtype}, expected {shape} and {dtype}"
    return None


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _remove_abandoned(folder: Path) -> None:
    for path in folder.glob(".*.tmp"):
        with contextlib.suppress(FileNotFoundError, PermissionError):  # another process may remove it, or own it
            if time.time() - path.stat().st_mtime > _ABANDONED_AFTER_S:
                path.unlink()


def _load(path: Path) -> NDArray[Any]:
    """Map an array; as a plain ndarray, because single elements of a memmap are slow to read."""
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
