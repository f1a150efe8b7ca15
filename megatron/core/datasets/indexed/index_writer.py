"""Write an ``.idx`` file in pieces, so that an index of any size takes little memory."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets.indexed.dataset_checksums import checksums_path
from megatron.core.datasets.indexed.indexed_dataset import (
    DTYPE_CODES,
    INDEX_HEADER,
    INDEX_MAGIC,
    INDEX_VERSION,
    bin_path,
    idx_path,
)

PIECE_LENGTH: Final = 1 << 20

Pieces = Callable[[], Iterator[NDArray[Any]]]
"""Gives the pieces of an array, one after the other, whenever it is called."""


def write_index(
    path: Path, dtype: np.dtype[Any], sequence_lengths: Pieces, sequence_counts: Pieces, modes: Pieces | None = None
) -> None:
    """Write the index of a data set whose tokens lie back to back, and force it to disk.

    Args:
        sequence_lengths: the tokens of each sequence, int32.
        sequence_counts: the sequences of each document, integers.
        modes: the mode of each sequence, int8, or None for a data set without modes.
    """
    (code,) = [code for code, known in DTYPE_CODES.items() if known == dtype]
    num_sequences = sum(map(len, sequence_lengths()))
    num_documents = sum(map(len, sequence_counts()))
    with open(path, "wb") as index:
        index.write(INDEX_HEADER.pack(INDEX_MAGIC, INDEX_VERSION, code, num_sequences, num_documents + 1))
        for piece in sequence_lengths():
            index.write(piece.astype("<i4").tobytes())
        position = 0
        for piece in sequence_lengths():
            num_bytes = piece.astype("<i8") * dtype.itemsize
            ends = position + np.cumsum(num_bytes)
            index.write((ends - num_bytes).tobytes())
            position = int(ends[-1])
        index.write(np.zeros(1, "<i8").tobytes())
        sequence = 0
        for piece in sequence_counts():
            ends = sequence + np.cumsum(piece.astype("<i8"))
            index.write(ends.tobytes())
            sequence = int(ends[-1])
        for piece in modes() if modes is not None else ():
            index.write(piece.astype("<i1").tobytes())
        index.flush()
        os.fsync(index.fileno())


def replace_tokens(prefix: str | Path, tokens: Path) -> None:
    """Let a file of tokens become the ``.bin`` of a data set, whose ``.idx`` must follow.

    A new ``.bin`` beside an old ``.idx`` would be a wrong pair: the old index and checksums are removed first.
    """
    idx_path(prefix).unlink(missing_ok=True)
    checksums_path(prefix).unlink(missing_ok=True)
    os.replace(tokens, bin_path(prefix))


def cut(values: NDArray[Any]) -> Iterator[NDArray[Any]]:
    """Yield the pieces of an array, none of them empty."""
    for begin in range(0, len(values), PIECE_LENGTH):
        yield values[begin : begin + PIECE_LENGTH]
