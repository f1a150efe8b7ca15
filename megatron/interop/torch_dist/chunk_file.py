"""A data file of this format while it is written: files of torch's zip format, one after the other."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from megatron.core.dist_checkpointing.mapping import dtype_name
from megatron.core.sharding import Box
from megatron.interop.megatron_torch.pickle_writer import PlannedTensor


@dataclass(frozen=True)
class ChunkPlace:
    """Say which box of which stored tensor a chunk is; the whole has the shape ``shape``."""

    key: str
    shape: tuple[int, ...]
    box: Box


@dataclass(frozen=True)
class WrittenEntry:
    """Say where an entry was written; ``place`` and ``dtype`` are None for an object."""

    key: str
    file: str
    start: int
    num_bytes: int
    place: ChunkPlace | None = None
    dtype: str | None = None


class ChunkFile:
    """Append chunks and objects to a new file; it is on disk when the context ends.

    Raises:
        OSError: from every method, where the file cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written: list[WrittenEntry] = []
        # Closed by __exit__.
        self._file = open(path, "wb")  # noqa: SIM115

    def __enter__(self) -> ChunkFile:
        """Return the file."""
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Force the file to disk, and close it."""
        try:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
        finally:
            self._file.close()

    @property
    def num_bytes(self) -> int:
        """Return the bytes written so far."""
        return self._file.tell()

    def append_chunk(self, place: ChunkPlace, values: torch.Tensor) -> None:
        """Append the values of a box; they get the box's shape."""
        values = values.detach().to("cpu").reshape(place.box.shape).contiguous()
        if values.untyped_storage().nbytes() != values.nbytes:
            values = values.clone()  # torch saves the whole storage of a view
        self._append(place.key, values, place, dtype_name(values.dtype))

    def append_object(self, key: str, value: Any) -> None:
        """Append an object as Megatron does: the only item of a list."""
        self._append(key, [_with_values(value)], None, None)

    def _append(self, key: str, value: Any, place: ChunkPlace | None, dtype: str | None) -> None:
        start = self.num_bytes
        try:
            torch.save(value, self._file)
        except RuntimeError as error:
            # What torch says of a file that takes no more hides what the file said.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        self.written.append(WrittenEntry(key, self.path.name, start, self.num_bytes - start, place, dtype))


def _with_values(value: Any) -> Any:
    """Return a value with tensors in the place of planned ones."""
    if isinstance(value, PlannedTensor):
        return value.values
    if isinstance(value, Mapping):
        return {key: _with_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_with_values(item) for item in value)
    return value
