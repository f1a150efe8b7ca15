"""Read files that others made: no more of them than a limit, and no JSON that exhausts the interpreter.

Importing this module imports no torch.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_MOST_DEPTH = 64
MOST_TEXT_BYTES = 1 << 28
"""How large a text file may be that is read as a whole: ten times the largest tokenizer that there is."""


def read_plain_file(path: Path, most: int = MOST_TEXT_BYTES) -> bytes:
    """Return what a regular file holds.

    Raises:
        OSError: it cannot be read, is a pipe or a device, or has more than ``most`` bytes.
    """
    # A pipe that nobody writes to would be waited for.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        found = os.fstat(descriptor)
        if stat.S_ISDIR(found.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "it is a pipe or a device, not a file", str(path))
        if found.st_size > most:
            raise OSError(errno.EFBIG, f"it has {found.st_size} bytes, and {most} are read at most", str(path))
        return file.read(most)


def read_plain_text(path: Path, most: int = MOST_TEXT_BYTES) -> str:
    """Return the text of a regular file.

    Raises:
        OSError: as `read_plain_file`.
        ValueError: it is not UTF-8.
    """
    return read_plain_file(path, most).decode("utf-8")


def parse_json(text: str) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: it is not JSON, or nests more than 64 deep, beyond which some reader of it would fail.
    """
    try:
        value = json.loads(text)
    except RecursionError as error:
        raise ValueError("it nests too deeply") from error
    level = [value]
    for _ in range(_MOST_DEPTH):
        level = [part for outer in level for part in _parts(outer) if isinstance(part, (dict, list))]
    if level:
        raise ValueError(f"it nests more than {_MOST_DEPTH} deep")
    return value


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()
