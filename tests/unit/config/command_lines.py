"""Small command lines and data sets for the tests of configuration and arguments."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

SHAPE = ["--num-layers", "2", "--hidden-size", "48", "--num-attention-heads", "6", "--seq-length", "40"]
TRAINING = ["--micro-batch-size", "2", "--train-iters", "10", "--lr", "1e-3"]
TOKENIZER = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "99"]
MINIMAL = [*SHAPE, *TRAINING, *TOKENIZER, "--mock-data"]
"""A whole command line without a problem, for one process."""


def write_data_set(prefix: Path, lengths: Sequence[int] = (3,) * 100) -> None:
    """Write PREFIX.bin and PREFIX.idx with zeros as 2-byte tokens, one sequence a document."""
    count = len(lengths)
    pointers, position = [], 0
    for length in lengths:
        pointers.append(position)
        position += 2 * length
    prefix.parent.mkdir(parents=True, exist_ok=True)
    prefix.with_name(prefix.name + ".bin").write_bytes(bytes(position))
    prefix.with_name(prefix.name + ".idx").write_bytes(
        struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, count, count + 1)
        + struct.pack(f"<{count}i", *lengths)
        + struct.pack(f"<{count}q", *pointers)
        + struct.pack(f"<{count + 1}q", *range(count + 1))
    )
