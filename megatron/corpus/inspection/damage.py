"""Verify a data set: find every block, index entry or token id that is damaged."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.core.datasets.indexed_dataset import (
    Damage,
    IndexedDataset,
    Read,
    bin_path,
    checksums_path,
    idx_path,
    untold,
    verify_checksums,
)
from megatron.core.errors import DataError


@dataclass(frozen=True)
class Verification:
    """Hold what was found.

    Attributes:
        faults: one line each; empty for a data set that is as it was written.
        has_checksums: whether every byte was compared, or the structure alone.
    """

    faults: list[str]
    has_checksums: bool


def verify_dataset(prefix: str, read: Read = untold) -> Verification:
    """Compare both files with their checksums, where there are some, and with each other.

    Raises:
        DataError: a file is missing, or the checksum file itself is damaged.
    """
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            raise DataError(f"data file {path} does not exist; a data set is given without .bin or .idx")
    has_checksums = checksums_path(prefix).exists()
    damages = list(verify_checksums(prefix, read)) if has_checksums else []
    faults = []
    dataset: IndexedDataset | None = None
    try:
        dataset = IndexedDataset(prefix)
        dataset.verify_structure()
    except DataError as error:
        faults.append(str(error))
        dataset = None
    located = (f"{damage}{_contents(dataset, damage)}" for damage in damages)
    return Verification([*located, *faults], has_checksums)


def _contents(dataset: IndexedDataset | None, damage: Damage) -> str:
    """Name the documents in a stretch of ``.bin``, where the index can be trusted."""
    if dataset is None or damage.path != bin_path(dataset.prefix) or not len(dataset):
        return ""
    ends = dataset.sequence_pointers + dataset.sequence_lengths.astype(np.int64) * dataset.dtype.itemsize
    first = min(int(np.searchsorted(ends, damage.start, side="right")), len(dataset) - 1)
    last = max(int(np.searchsorted(dataset.sequence_pointers, damage.stop, side="left")) - 1, first)
    documents = np.searchsorted(dataset.document_indices, (first, last), side="right") - 1
    return f" (sequences {first} to {last}, documents {int(documents[0])} to {int(documents[1])})"


def intact_dataset(prefix: str) -> IndexedDataset:
    """Open a data set and check that its index is consistent.

    Raises:
        DataError: it is not.
    """
    dataset = IndexedDataset(prefix)
    dataset.verify_structure()
    return dataset


def without_suffix(prefix: str) -> str:
    """Return the prefix of a data set that was named by one of its files."""
    path = Path(prefix)
    return str(path.with_suffix("")) if path.suffix in (".bin", ".idx") and path.is_file() else prefix


def faults_in_vocabulary(num_outside: int, prefix: str, vocab_size: int) -> Iterator[str]:
    """Yield what is wrong where tokens are not in the vocabulary."""
    if num_outside:
        yield f"{bin_path(prefix)}: {num_outside} tokens are not among the {vocab_size} ids of the tokenizer"
