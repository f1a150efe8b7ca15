"""Copies of objects on this machine, for what can only be read as a local file: fetched once, whatever asks for them.

Importing this module imports no torch.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from megatron.core.errors import StorageError
from megatron.core.files.object_path import ObjectPath

_CHUNK_BYTES = 64 << 20
_CACHE = Path("megatron") / "objects"


def local_copy(folder: Path) -> Path:
    """Return a folder of this machine, of the same name, with the files directly in another one.

    A local folder is returned as it is.

    Raises:
        StorageError: the objects cannot be read, or not be written here.
    """
    if not isinstance(folder, ObjectPath):
        return folder
    try:
        return fetch([path for path in folder.iterdir() if path.is_file()], machine_cache(), folder.name)
    except OSError as error:
        raise StorageError(f"cannot copy {folder} to this machine: {error.strerror or error}") from error


def machine_cache() -> Path:
    """Return the folder of this user on this machine that copies of objects are kept in."""
    for parent in (Path("~/.cache").expanduser(), Path(tempfile.gettempdir()) / f"cache-{os.getuid()}"):
        folder = parent / _CACHE
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK) and folder.stat().st_uid == os.getuid():
            return folder
    raise StorageError("this machine has no folder for copies of objects: neither ~/.cache nor TMPDIR can be written")


def fetch(objects: Sequence[ObjectPath], cache: Path, name: str = "files") -> Path:
    """Return a folder of a ``name`` with copies of objects, under their own, fetched by one process of this machine.

    An object that was written anew is fetched anew.

    Raises:
        OSError: an object cannot be read, or the folder not be written.
    """
    known = [(str(path), status.st_size, status.st_mtime_ns) for path in objects for status in (path.stat(),)]
    folder = cache / hashlib.blake2b(json.dumps([name, *known]).encode(), digest_size=16).hexdigest()
    if folder.is_dir():
        return folder / name
    cache.mkdir(parents=True, exist_ok=True)
    with _lock(cache / f".{folder.name}.lock"):
        if folder.is_dir():
            return folder / name
        made = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=cache))
        try:
            (made / name).mkdir()
            for path, (_, num_bytes, _) in zip(objects, known, strict=True):
                _download(path, num_bytes, made / name / path.name)
            os.rename(made, folder)
        finally:
            shutil.rmtree(made, ignore_errors=True)
    return folder / name


def _download(path: ObjectPath, num_bytes: int, target: Path) -> None:
    store = path.store
    with open(target, "xb") as file:
        for start in range(0, num_bytes, _CHUNK_BYTES):
            file.write(store.read(str(path), start, min(start + _CHUNK_BYTES, num_bytes)))
        if file.tell() != num_bytes:
            raise StorageError(f"{path} has {file.tell()} of {num_bytes} bytes: it was written anew at this moment")


@contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Let one process of this machine in at a time."""
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
