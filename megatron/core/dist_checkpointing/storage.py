"""Shard files: safetensors written one piece at a time, and whether one is as it was written."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from megatron.core.dist_checkpointing.mapping import StoredFile, StoredPiece
from megatron.core.dist_checkpointing.sequential_file import SequentialFile
from megatron.core.dist_checkpointing.validation import DamagedCheckpointError

_SAFETENSORS_DTYPES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_LENGTH_BYTES = 8


@dataclass(frozen=True, eq=False)
class ShardEntry:
    """Name the values of one entry of a shard file; ``values`` may be a view on any device."""

    key: str
    values: torch.Tensor


@dataclass(frozen=True)
class WrittenEntry:
    """Say where an entry went."""

    start: int
    num_bytes: int
    checksum: str


def checksum(data: bytes | bytearray | memoryview) -> str:
    """Return the CRC-32 of the bytes as eight hex digits."""
    return f"{zlib.crc32(data):08x}"


def shard_header(entries: Sequence[ShardEntry]) -> bytes:
    """Return a safetensors header for the entries in their order, its length field included."""
    fields: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for entry in entries:
        end = start + entry.values.numel() * entry.values.element_size()
        fields[entry.key] = {
            "dtype": _SAFETENSORS_DTYPES[entry.values.dtype],
            "shape": list(entry.values.shape),
            "data_offsets": [start, end],
        }
        start = end
    text = json.dumps(fields, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def write_shard(path: Path, entries: Sequence[ShardEntry]) -> tuple[StoredFile, list[WrittenEntry]]:
    """Write entries to a safetensors file and force it to disk; no more than one entry is copied at a time.

    Entries of wide types must come first, so that every one is aligned in the file.

    Raises:
        OSError: the file cannot be written.
    """
    header = shard_header(entries)
    written = []
    with SequentialFile(path, shard_bytes(entries)) as file:
        file.append(header)
        for entry in entries:
            start = file.num_bytes
            crc = file.append(_bytes_of(entry.values))
            written.append(WrittenEntry(start, file.num_bytes - start, f"{crc:08x}"))
    return StoredFile(file.num_bytes, len(header), checksum(header)), written


def shard_bytes(entries: Sequence[ShardEntry]) -> int:
    """Return the size of the file that `write_shard` makes of the entries."""
    data_bytes = sum(entry.values.numel() * entry.values.element_size() for entry in entries)
    return len(shard_header(entries)) + data_bytes


def check_file(path: Path, expected: StoredFile, pieces: Sequence[StoredPiece], verify: bool = True) -> None:
    """Compare a shard file's size, and with ``verify`` its header, with what the index says.

    Raises:
        DamagedCheckpointError: the file is missing or differs; the message names the pieces that are lost.
    """
    try:
        num_bytes = path.stat().st_size
        with open(path, "rb") as file:
            header = file.read(expected.header_bytes) if verify else b""
    except OSError as error:
        lost = _name_some({piece.key for piece in pieces})
        raise DamagedCheckpointError(f"{path}: {error.strerror}{lost}") from error
    if num_bytes != expected.num_bytes:
        problem = f"has {num_bytes} bytes, {expected.num_bytes} were written"
    elif verify and checksum(header) != expected.header_checksum:
        problem = "the header does not match its checksum"
    else:
        return
    lost = _name_some({piece.key for piece in pieces} - readable_keys(path))
    raise DamagedCheckpointError(f"{path}: {problem}{lost}")


def _name_some(keys: set[str]) -> str:
    """Return the end of a message about tensors that are lost; of very many, the first few."""
    names = sorted(keys)
    more = f" and {len(names) - 20} more" if len(names) > 20 else ""
    return f"; lost: {', '.join(names[:20])}{more}" if names else ""


def readable_keys(path: Path) -> set[str]:
    """Return the keys that a safetensors file's own header lists and whose bytes the file reaches."""
    try:
        num_bytes = path.stat().st_size
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            fields = json.loads(file.read(min(length, num_bytes)))
        data_bytes = num_bytes - _LENGTH_BYTES - length
        return {
            key
            for key, entry in fields.items()
            if key != "__metadata__" and int(entry["data_offsets"][1]) <= data_bytes
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
        # A header that cannot be read gives access to nothing.
        return set()


def sync_folder(folder: Path) -> None:
    """Force a folder's entries (new files, renames) to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write a small file and force it to disk."""
    with open(path, "w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(values: torch.Tensor) -> NDArray[np.uint8]:
    flat = values.detach().to("cpu").contiguous().reshape(-1)
    bytes_of_values: NDArray[np.uint8] = flat.view(torch.uint8).numpy()
    return bytes_of_values
