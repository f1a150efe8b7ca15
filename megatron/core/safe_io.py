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
"""Size limit of a text file that is read as a whole: ten times the size of the largest tokenizer."""
MAX_DEPTH = 64


def open_plain_file(path: str | Path) -> io.FileIO:
    """Open a file for reading, unbuffered.

    Pipes and devices, whose reading may never end, and folders are rejected; opening them does not block either.

    Raises:
        OSError: it does not exist, cannot be read, or is not a regular file.
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
    """Return the contents of a file or an object.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than ``most`` bytes.
    """
    if isinstance(path, ObjectPath):
        _check_size(path, path.store.size(str(path)), most)
        return path.read_bytes()
    with open_plain_file(path) as file:
        size = os.fstat(file.fileno()).st_size
        _check_size(path, size, most)
        return file.read(size)  # not `most`: that much memory would be allocated first


def read_plain_text(path: str | Path, most: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a file.

    Raises:
        OSError: it cannot be read, is not a regular file, or has more than ``most`` bytes.
        ValueError: it is not UTF-8.
    """
    return read_plain_file(path, most).decode("utf-8")


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text.

    Raises:
        ValueError: the text is not JSON, or nests more than `MAX_DEPTH` levels.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("the JSON is nested too deeply") from error
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _members(outer) if isinstance(inner, (dict, list))]
        if not level:
            return value
    raise ValueError("the JSON is nested too deeply")


def is_plain_name(name: object) -> bool:
    """Return whether a value is a plain file name without a path, so that it cannot leave its folder."""
    return isinstance(name, str) and name not in ("", ".", "..") and not set(name) & {"/", "\\", "\0"}


def _check_size(path: str | Path, size: int, most: int) -> None:
    if size > most:
        raise OSError(errno.EFBIG, f"it has {size} bytes, but at most {most} are supported", str(path))


def _members(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _kind(mode: int) -> str:
    kinds = ((stat.S_ISDIR, "a folder"), (stat.S_ISFIFO, "a pipe"), (stat.S_ISSOCK, "a socket"))
    return next((name for is_it, name in kinds if is_it(mode)), "a device")
