"""Write a file of lines under a temporary name, read it back while it grows, and publish it when complete."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from types import TracebackType

from megatron.core.errors import DataError


class OutputFile:
    """Write under a temporary name; `publish` gives the file its name, and leaving without it removes the file.

    Raises:
        DataError: the file cannot be written (a full disk, for example).
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.tmp-{secrets.token_hex(6)}")
        self._position = self._flushed = 0
        try:
            self._file = open(self._temporary, "xb+", buffering=1 << 20)  # noqa: SIM115
        except OSError as error:
            raise DataError(f"{path} cannot be written: {error}") from error

    @property
    def temporary_name(self) -> str:
        """Give the name that the file has until it is published."""
        return self._temporary.name

    def __enter__(self) -> OutputFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            self._file.close()
        except OSError:
            if kind is None:  # else the same fault is on its way already
                raise
        finally:
            self._temporary.unlink(missing_ok=True)

    def write(self, line: bytes) -> int:
        """Append a line and return where it begins."""
        begin = self._position
        try:
            self._file.write(line)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error}") from error
        self._position += len(line)
        return begin

    def read(self, begin: int, num_bytes: int) -> bytes:
        """Return what was written at a place."""
        try:
            if begin + num_bytes > self._flushed:
                self._file.flush()
                self._flushed = self._position
            return os.pread(self._file.fileno(), num_bytes, begin)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error}") from error

    def publish(self) -> None:
        """Give the file its name."""
        try:
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._temporary, self.path)
        except OSError as error:
            raise DataError(f"{self.path} cannot be written: {error}") from error
