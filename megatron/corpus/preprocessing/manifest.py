"""Read and write the manifest: one JSON line that describes the work, then one for each finished chunk."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from megatron.core.datasets.indexed_dataset import Block, checksum_blocks
from megatron.corpus.preprocessing.chunks import Chunk

FORMAT: Final = 2
COMPLETE: Final = b'{"complete": true}\n'
"""The last line, when only moving the files to their places is left."""


@dataclass(frozen=True)
class StreamTally:
    """Hold what a chunk adds to one stream: bytes and checksums of tokens, lengths and counts."""

    num_bytes: tuple[int, int, int]
    token_blocks: list[Block]
    lengths_crc32: int
    counts_crc32: int

    @classmethod
    def of(cls, tokens: bytes | memoryview, lengths: bytes, counts: bytes) -> StreamTally:
        """Count and sum up what is added."""
        num_bytes = (len(tokens), len(lengths), len(counts))
        return cls(num_bytes, checksum_blocks(tokens), zlib.crc32(lengths), zlib.crc32(counts))


@dataclass(frozen=True)
class Entry:
    """Record that a chunk is written, after all chunks before it.

    Attributes:
        streams: which file each tally went to, and the tally.
        num_skipped: lines that --on-error skip left out.
    """

    chunk: Chunk
    num_lines: int
    num_documents: int
    num_skipped: int
    streams: list[tuple[int, StreamTally]]

    def to_json(self) -> dict[str, Any]:
        """Return the content of a line."""
        chunk = self.chunk
        return {
            "chunk": chunk.number,
            "file": chunk.file,
            "begin": chunk.begin,
            "bytes": chunk.num_bytes,
            "source_bytes": chunk.source_bytes,
            "input_crc32": chunk.crc32,
            "lines": self.num_lines,
            "documents": self.num_documents,
            "skipped": self.num_skipped,
            "streams": [
                {
                    "stream": stream,
                    "bytes": list(tally.num_bytes),
                    "tokens": [list(block) for block in tally.token_blocks],
                    "lengths_crc32": tally.lengths_crc32,
                    "counts_crc32": tally.counts_crc32,
                }
                for stream, tally in self.streams
            ],
        }

    @classmethod
    def from_json(cls, line: dict[str, Any]) -> Entry:
        """Read the content of a line.

        Raises:
            KeyError, TypeError, ValueError: it is not one.
        """
        chunk = Chunk(
            line["chunk"],
            line["file"],
            line["begin"],
            line["bytes"],
            crc32=line["input_crc32"],
            source_bytes=line["source_bytes"],
        )
        streams = []
        for item in line["streams"]:
            tokens, lengths, counts = item["bytes"]
            blocks = [Block(*block) for block in item["tokens"]]
            tally = StreamTally((tokens, lengths, counts), blocks, item["lengths_crc32"], item["counts_crc32"])
            streams.append((item["stream"], tally))
        return cls(chunk, line["lines"], line["documents"], line["skipped"], streams)


def read_description(path: Path) -> dict[str, Any] | None:
    """Return the description of the work, or None where there is no usable one."""
    try:
        with open(path, "rb") as file:
            line = file.readline()
    except FileNotFoundError:
        return None
    description = _object(line) if line.endswith(b"\n") else None
    return description if description is not None and description.get("format") == FORMAT else None


def ends_complete(path: Path) -> bool:
    """Return whether the last line says that the work is complete."""
    with open(path, "rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - len(COMPLETE) - 1))
        return file.read().endswith(b"\n" + COMPLETE)


def read_entries(path: Path) -> Iterator[tuple[int, Entry]]:
    """Yield each chunk's entry and where its line ends, up to the first line that is not whole."""
    with open(path, "rb") as file:
        position = len(file.readline())
        for number, line in enumerate(file):
            position += len(line)
            content = _object(line) if line.endswith(b"\n") else None
            if content is None or content.get("chunk") != number:
                return
            yield position, Entry.from_json(content)


def _object(line: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(line)
    except ValueError:
        return None
    return content if isinstance(content, dict) else None
