"""Damaged and forged .idx files give sequences of the .bin file, or are refused in one line."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from megatron.core.datasets.indexed_dataset import INDEX_HEADER, IndexedDataset
from megatron.core.errors import InputError
from tests.harness.bounded import bad_cases
from tests.harness.mutations import mutated_bytes
from tests.unit.training.config.command_lines import write_data_set

_COUNTS = (0, 1, 99, 101, 2**31, 2**32, 2**60, 2**62, 2**63, 2**64 - 1)


def mutated_index(data: bytes, draw: Random) -> bytes:
    """Return an index with other counts in its header, other entries, or damaged bytes."""
    if draw.random() < 0.4:
        return mutated_bytes(data, draw)
    magic, version, code, sequences, documents = INDEX_HEADER.unpack_from(data)
    body = bytearray(data[INDEX_HEADER.size :])
    kind = draw.randrange(3)
    if kind == 0:
        sequences, documents = draw.choice((*_COUNTS, sequences)), draw.choice((*_COUNTS, documents))
    elif kind == 1:
        code = draw.randrange(256)
    else:
        place = draw.randrange(0, len(body) - 8, 4)
        body[place : place + 8] = struct.pack("<q", draw.choice((-1, 1, 2**31, 2**62, -(2**63), 601, 5)))
    return INDEX_HEADER.pack(magic, version, code, sequences, documents) + body


def attempts(tmp_path: Path) -> Callable[[int], None]:
    """Return what reads all of a data set whose index is mutated."""
    prefix = tmp_path / "data"
    write_data_set(prefix)
    index = tmp_path / "data.idx"
    original = index.read_bytes()

    def attempt(number: int) -> None:
        draw = Random(f"index {number}")
        new = tmp_path / "data.idx.new"
        new.write_bytes(mutated_index(original, draw))
        os.replace(new, index)
        message = "none"
        try:
            data = IndexedDataset(str(prefix), mmap_bin_files=draw.random() < 0.5)
            for sequence in range(len(data)):
                assert data[sequence].nbytes <= 600
        except InputError as error:
            message = str(error)
        assert message

    attempt(0)
    return attempt


def test_mutated_indices_are_read_or_refused(tmp_path: Path) -> None:
    assert bad_cases(attempts(tmp_path), 500) == []


@pytest.mark.long
def test_ten_thousand_mutated_indices_are_read_or_refused(tmp_path: Path) -> None:
    assert bad_cases(attempts(tmp_path), 10_000) == []
