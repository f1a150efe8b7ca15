"""What one worker process does: tokenize chunks, and write them where the leader says."""

from __future__ import annotations

import os
import signal
import traceback
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Final

import numpy as np

from megatron.core.datasets.dataset_checksums import Block, checksum_blocks
from megatron.core.datasets.json_lines import Problem
from megatron.core.errors import InputError
from tools.preprocessing.chunks import Chunk, read_chunk
from tools.preprocessing.input_files import InputFile
from tools.preprocessing.placed_file import PlacedFile, aligned_buffer
from tools.preprocessing.tokenized_chunk import Recipe, Stream, TokenizedChunk, tokenize_block

PARTS: Final = ("tokens", "lengths", "counts")
"""The files of a stream, each an array of which every chunk adds a part."""


@dataclass(frozen=True)
class StreamTally:
    """Say what a chunk adds to one stream: bytes and checksums of tokens, lengths and counts."""

    num_bytes: tuple[int, int, int]
    token_blocks: list[Block]
    lengths_crc32: int
    counts_crc32: int


@dataclass(frozen=True)
class Tally:
    """Say what a chunk came to, before it is written."""

    chunk: int
    streams: list[StreamTally]
    num_lines: int
    num_documents: int
    problems: list[Problem]


@dataclass(frozen=True)
class Place:
    """Say where in the files of each stream a chunk goes, and which file each of its streams is."""

    chunk: int
    streams: list[int]
    offsets: list[tuple[int, int, int]]


@dataclass(frozen=True)
class Written:
    """Report that a chunk stands where it belongs."""

    chunk: int


@dataclass(frozen=True)
class Failure:
    """Report why a worker gives up: input that cannot be used, or a fault of the program with its traceback."""

    error: InputError | None
    traceback: str


def stream_paths(folder: Path, stream: int) -> tuple[Path, Path, Path]:
    """Return the files of a stream, in the order of `PARTS`."""
    tokens, lengths, counts = (folder / f"{stream}.{part}" for part in PARTS)
    return tokens, lengths, counts


def work(
    connection: Connection,
    files: Sequence[InputFile],
    recipe: Recipe,
    folder: Path,
    num_streams: int,
    max_growth_bytes: int,
) -> None:
    """Answer the leader's messages until it closes the connection; grow by about so much memory at most."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a keyboard's interrupt is the leader's business
    try:
        buffer = aligned_buffer()
        outputs = [[PlacedFile(path, buffer) for path in stream_paths(folder, stream)] for stream in range(num_streams)]
        unwritten: dict[int, TokenizedChunk] = {}
        start_bytes = _memory_bytes()
        while True:
            message = connection.recv()
            if isinstance(message, Chunk):
                unwritten[message.number] = done = tokenize_block(read_chunk(message, files[message.file]), recipe)
                connection.send(_tally(message.number, done))
                if _memory_bytes() - start_bytes > max_growth_bytes:
                    recipe.encoder.renew()
                    start_bytes = _memory_bytes()
            else:
                for stream, index, offsets in zip(
                    unwritten.pop(message.chunk).streams, message.streams, message.offsets
                ):
                    for output, part, offset in zip(outputs[index], _parts(stream), offsets):
                        output.write(part, offset)
                connection.send(Written(message.chunk))
    except (EOFError, ConnectionError):
        return  # the leader is gone, or has what it needs
    except InputError as error:
        connection.send(Failure(error, ""))
    except Exception:  # noqa: BLE001 - it is reported by the leader, with its traceback
        connection.send(Failure(None, traceback.format_exc()))


def _parts(stream: Stream) -> tuple[memoryview, memoryview, memoryview]:
    tokens, lengths, counts = (part.view(np.uint8).data for part in (stream.tokens, stream.lengths, stream.counts))
    return tokens, lengths, counts


def _tally(number: int, chunk: TokenizedChunk) -> Tally:
    streams = []
    for stream in chunk.streams:
        tokens, lengths, counts = _parts(stream)
        sizes = (len(tokens), len(lengths), len(counts))
        streams.append(StreamTally(sizes, checksum_blocks(tokens), zlib.crc32(lengths), zlib.crc32(counts)))
    return Tally(number, streams, chunk.num_lines, chunk.num_documents, chunk.problems)


def _memory_bytes() -> int:
    """Measure what this process holds for itself now; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
