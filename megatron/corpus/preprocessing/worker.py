"""Tokenize chunks in one worker process."""

from __future__ import annotations

import os
import signal
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

import numpy as np

from megatron.core.errors import InputError
from megatron.corpus.json_lines import Problem
from megatron.corpus.preprocessing.chunks import read_chunk
from megatron.corpus.preprocessing.input_files import InputFile
from megatron.corpus.preprocessing.tokenized_chunk import Recipe, TokenizedChunk, tokenize_block


@dataclass(frozen=True)
class Content:
    """Hold what a chunk adds to one stream.

    Attributes:
        place: where in the shared memory the tokens are, begin and end in bytes; None where they are ``tokens``.
        lengths, counts: the bytes of the arrays.
    """

    place: tuple[int, int] | None
    tokens: bytes
    lengths: bytes
    counts: bytes


@dataclass(frozen=True)
class Tally:
    """Hold the result of a chunk and the slot that its tokens are in."""

    chunk: int
    slot: int
    streams: list[Content]
    num_lines: int
    num_documents: int
    problems: list[Problem]


@dataclass(frozen=True)
class Failure:
    """Report why a worker gives up: input that cannot be used, or a fault of the program with its traceback."""

    error: InputError | None
    traceback: str


def work(
    connection: Connection,
    slots: Sequence[memoryview],
    files: Sequence[InputFile],
    recipe: Recipe,
    max_growth_bytes: int,
) -> None:
    """Tokenize the chunks that come, each into the slot that comes with it, until the connection is closed.

    The slots are memory that is shared with the leader. This process grows by about ``max_growth_bytes`` at most.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a keyboard's interrupt is the leader's business
    try:
        rooms = [np.frombuffer(slot, recipe.dtype) for slot in slots]
        start_bytes = _memory_bytes()
        while True:
            chunk, slot = connection.recv()
            done = tokenize_block(read_chunk(chunk, files[chunk.file]), recipe, rooms[slot])
            connection.send(_tally(chunk.number, slot, done))
            if _memory_bytes() - start_bytes > max_growth_bytes:
                recipe.encoder.renew()
                start_bytes = _memory_bytes()
    except (EOFError, ConnectionError):
        return  # the leader is gone, or has what it needs
    except InputError as error:
        connection.send(Failure(error, ""))
    except Exception:  # noqa: BLE001 - it is reported by the leader, with its traceback
        connection.send(Failure(None, traceback.format_exc()))


def _tally(number: int, slot: int, chunk: TokenizedChunk) -> Tally:
    contents = []
    for stream in chunk.streams:
        place, tokens = None, b""
        if stream.begin is None:
            tokens = stream.tokens.tobytes()
        else:
            begin = stream.begin * stream.tokens.itemsize
            place = (begin, begin + stream.tokens.nbytes)
        contents.append(Content(place, tokens, stream.lengths.tobytes(), stream.counts.tobytes()))
    return Tally(number, slot, contents, chunk.num_lines, chunk.num_documents, chunk.problems)


def _memory_bytes() -> int:
    """Measure what this process holds for itself now; 0 where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except OSError:
        return 0
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")
