"""Read untrusted files safely: only regular files, only up to a size limit, with bounded JSON parsing.

Importing this module imports no torch.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from megatron.core.object_store import ObjectPath

MAX_TEXT_BYTES = 1 << 28
"""How large a text file may be that is read as a whole: ten times the largest tokenizer that there is."""
MAX_DEPTH = 64


def open_plain_file(path: str | Path) -> io.FileIO:
    """Open a file for reading, unbuffered.

    A pipe or a device, whose reading may never end, and a folder are refused; opening them does not wait either.

    Raises:
        OSError: there is none, it cannot be read, or it is no file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, f"is {_kind(mode)}, not a file", str(path))
        return open(descriptor, "rb", buffering=0)
    except BaseException:
        os.close(descriptor)
        raise


def read_plain_file(path: str | Path, most: int = MAX_TEXT_BYTES) -> bytes:
    """Return what a file or an object holds.

    Raises:
        OSError: it cannot be read, is no file, or has more than ``most`` bytes.
    """
    if isinstance(path, ObjectPath):
        _check_size(path, path.store.size(str(path)), most)
        return path.read_bytes()
    with open_plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, most)
        return file.read(size)  # not most: that much memory would be taken first


def read_plain_text(path: str | Path, most: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a file.

    Raises:
        OSError: it cannot be read, is no file, or has more than ``most`` bytes.
        ValueError: it is not UTF-8.
    """
    return read_plain_file(path, most).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Return what a JSON text says.

    Raises:
        ValueError: it is not JSON, or nests more than `MAX_DEPTH` levels.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _members(outer) if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise ValueError("it nests too deeply")


def is_plain_name(name: object) -> bool:
    """Return whether a value names a file of a folder, and nothing outside it."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def _check_size(path: str | Path, size: int, most: int) -> None:
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes, and {most} are read at most", str(path))


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_it, name in kinds if is_it(mode)), "a device")
