"""One copy of one rank's state: a file in memory that is whole, or known not to be."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

_PREAMBLE = struct.Struct("=QQ")


@dataclass(frozen=True)
class CopyFile:
    """Name the file of a copy: a preamble, the bytes of all tensors, and a record in JSON.

    The preamble has the sizes of both, and is zero while the file is being written: a process that is killed
    meanwhile leaves a copy that nobody takes for one.
    """

    path: Path

    def allocate(self, num_bytes: int) -> torch.Tensor:
        """Make the file one that is not whole, and return the memory of its tensors, to be filled.

        Shapes: ``-> [num_bytes]`` uint8.

        Raises:
            OSError: there is no room for it.
        """
        descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            os.pwrite(descriptor, _PREAMBLE.pack(0, 0), 0)
            # Memory that is mapped and not there would end the process when it is written to.
            os.posix_fallocate(descriptor, 0, _PREAMBLE.size + num_bytes)
            os.ftruncate(descriptor, _PREAMBLE.size + num_bytes)
        finally:
            os.close(descriptor)
        return self._map(num_bytes)

    def complete(self, num_bytes: int, record: Mapping[str, Any]) -> None:
        """Write the record, and then that the file is whole.

        Raises:
            OSError: there is no room for it.
        """
        text = json.dumps(record).encode()
        descriptor = os.open(self.path, os.O_RDWR)
        try:
            os.posix_fallocate(descriptor, _PREAMBLE.size + num_bytes, len(text))
            os.pwrite(descriptor, text, _PREAMBLE.size + num_bytes)
            os.pwrite(descriptor, _PREAMBLE.pack(num_bytes, len(text)), 0)
        finally:
            os.close(descriptor)

    def record(self) -> dict[str, Any] | None:
        """Return the record, None where the file is not whole, or not there."""
        try:
            with self.path.open("rb") as stream:
                num_bytes, length = _PREAMBLE.unpack(stream.read(_PREAMBLE.size))
                if not length:
                    return None
                stream.seek(_PREAMBLE.size + num_bytes)
                record: dict[str, Any] = json.loads(stream.read(length))
                return record
        except (OSError, struct.error, ValueError):
            return None

    def tensors(self) -> torch.Tensor:
        """Return the memory of a whole file's tensors.

        Shapes: ``-> [bytes]`` uint8.
        """
        with self.path.open("rb") as stream:
            num_bytes, _ = _PREAMBLE.unpack(stream.read(_PREAMBLE.size))
        return self._map(num_bytes)

    def _map(self, num_bytes: int) -> torch.Tensor:
        size = _PREAMBLE.size + num_bytes
        return torch.from_file(str(self.path), shared=True, size=size, dtype=torch.uint8)[_PREAMBLE.size :]
