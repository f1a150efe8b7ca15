"""The checksum file beside a data set: ``PREFIX.checksums.json``, a CRC-32 of each block of ``.bin`` and ``.idx``.

::

    {"format": 1, "algorithm": "crc32",
     "bin": {"block_bytes": [1048576, 523], "crc32": ["90f599e3", "7355c460"]},
     "idx": {"block_bytes": [3242], "crc32": ["0a1b2c3d"]}}

The blocks of a file lie back to back from its first byte on; they may differ in size. Opening a data set does not read
this file; ``tools/inspect_dataset.py --verify`` does.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from megatron.core.datasets.indexed.indexed_dataset import bin_path, idx_path
from megatron.core.errors import DataError
from megatron.core.safe_io import parse_json, read_plain_text

CHECKSUM_BLOCK_BYTES: Final = 1 << 20
_FORMAT: Final = 1
_ALGORITHM: Final = "crc32"
Read = Callable[[int], None]
"""Told how many bytes more have been read."""


class Block(NamedTuple):
    """Hold the size and the CRC-32 of one stretch of a file."""

    num_bytes: int
    crc32: int


class Damage(NamedTuple):
    """Name a stretch of a file that is not what was written."""

    path: Path
    start: int
    stop: int
    reason: str

    def __str__(self) -> str:
        return f"{self.path}: bytes {self.start} to {self.stop}: {self.reason}"


def untold(num_bytes: int) -> None:
    """Tell nobody of bytes that are read."""


def checksums_path(prefix: str | Path) -> Path:
    """Return the path of the checksums of a data set."""
    return Path(f"{prefix}.checksums.json")


def checksum_blocks(data: bytes | memoryview) -> list[Block]:
    """Cut data that follows what was written before into blocks, with their checksums."""
    view = memoryview(data).cast("B")
    return [
        Block(len(part), zlib.crc32(part))
        for part in (view[i : i + CHECKSUM_BLOCK_BYTES] for i in range(0, len(view), CHECKSUM_BLOCK_BYTES))
    ]


def file_blocks(path: Path, read: Read = untold) -> list[Block]:
    """Read a whole file and return its blocks."""
    blocks = []
    with open(path, "rb", buffering=0) as file:
        while data := file.read(CHECKSUM_BLOCK_BYTES):
            blocks.append(Block(len(data), zlib.crc32(data)))
            read(len(data))
    return blocks


def write_checksums(prefix: str | Path, bin_blocks: Sequence[Block] | None = None, read: Read = untold) -> None:
    """Write the checksum file of a data set that is in place, by renaming.

    Without ``bin_blocks`` the blocks of ``.bin`` are read from the file.

    Raises:
        DataError: a file cannot be read or written.
    """
    target = checksums_path(prefix)
    # Always the same name, so that what a killed writer left is taken up by the next one.
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        blocks = file_blocks(bin_path(prefix), read) if bin_blocks is None else bin_blocks
        content = {
            "format": _FORMAT,
            "algorithm": _ALGORITHM,
            "bin": _blocks_to_json(blocks),
            "idx": _blocks_to_json(file_blocks(idx_path(prefix), read)),
        }
        try:
            with open(temporary, "w", encoding="ascii") as file:
                json.dump(content, file)
                file.write("\n")
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, target)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"the checksums of {prefix} cannot be written: {error}") from error


def verify_checksums(prefix: str | Path, read: Read = untold) -> Iterator[Damage]:
    """Read both files of a data set whole and yield every block that differs from its checksum.

    Raises:
        DataError: the checksum file is missing or damaged, or a data file is missing.
    """
    stored = _read_checksums(checksums_path(prefix))
    for path, blocks in ((bin_path(prefix), stored["bin"]), (idx_path(prefix), stored["idx"])):
        try:
            yield from _damages(path, blocks, read)
        except OSError as error:
            raise DataError(f"{path} cannot be read: {error}") from error


def _damages(path: Path, blocks: Sequence[Block], read: Read) -> Iterator[Damage]:
    start = 0
    with open(path, "rb", buffering=0) as file:
        for num_bytes, crc32 in blocks:
            crc, left = 0, num_bytes
            while left and (data := file.read(min(left, CHECKSUM_BLOCK_BYTES))):
                crc = zlib.crc32(data, crc)
                left -= len(data)
                read(len(data))
            if left:
                expected = sum(block.num_bytes for block in blocks)
                found = start + num_bytes - left
                yield Damage(path, found, expected, f"missing: the file ends after {found} of {expected} bytes")
                return
            if crc != crc32:
                yield Damage(path, start, start + num_bytes, f"CRC-32 {crc:08x}, written as {crc32:08x}")
            start += num_bytes
        surplus = os.fstat(file.fileno()).st_size - start
        if surplus:
            yield Damage(path, start, start + surplus, f"{surplus} bytes too many")


def _blocks_to_json(blocks: Sequence[Block]) -> dict[str, list[Any]]:
    return {
        "block_bytes": [block.num_bytes for block in blocks],
        "crc32": [f"{block.crc32:08x}" for block in blocks],
    }


def _read_checksums(path: Path) -> dict[str, list[Block]]:
    try:
        content = parse_json(read_plain_text(path))
        if (content["format"], content["algorithm"]) != (_FORMAT, _ALGORITHM):
            raise DataError(
                f"{path} has format {content['format']} with {content['algorithm']}; only 1 with crc32 is read"
            )
        return {name: _blocks_from_json(content[name]) for name in ("bin", "idx")}
    except FileNotFoundError as error:
        raise DataError(f"{path} does not exist; without checksums only the structure can be verified") from error
    except (OSError, ValueError, KeyError, TypeError, OverflowError) as error:
        raise DataError(f"{path} is damaged ({type(error).__name__}: {error}); write the checksums again") from error


def _blocks_from_json(entry: dict[str, list[Any]]) -> list[Block]:
    sizes, sums = entry["block_bytes"], entry["crc32"]
    if len(sizes) != len(sums) or any(type(size) is not int or size < 0 for size in sizes):
        raise ValueError("sizes and checksums do not fit together")
    return [Block(size, int(crc, 16)) for size, crc in zip(sizes, sums)]
