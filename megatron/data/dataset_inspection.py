"""Verify a data set, and compute statistics of its documents and tokens."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets import (
    Damage,
    IndexedDataset,
    Read,
    bin_path,
    checksums_path,
    idx_path,
    ignore_bytes_read,
    verify_checksums,
)
from megatron.core.errors import DataError


@dataclass(frozen=True)
class Verification:
    """Result of the verification of a data set.

    Attributes:
        faults: one line per fault; empty for an intact data set.
        has_checksums: whether every byte was verified, rather than only the structure.
    """

    faults: list[str]
    has_checksums: bool


def verify_dataset(prefix: str, read: Read = ignore_bytes_read) -> Verification:
    """Verify both files against their checksums, if there are any, and against each other.

    Raises:
        DataError: a file is missing, or the checksum file is damaged.
    """
    for path in (bin_path(prefix), idx_path(prefix)):
        if not path.is_file():
            raise DataError(f"data file {path} does not exist; pass the data set without .bin or .idx")
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
    """Describe the documents in a damaged range of ``.bin``, if the index is valid."""
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
        DataError: the index is inconsistent.
    """
    dataset = IndexedDataset(prefix)
    dataset.verify_structure()
    return dataset


def without_suffix(prefix: str) -> str:
    """Return the prefix of a data set, given the prefix or one of its files."""
    path = Path(prefix)
    return str(path.with_suffix("")) if path.suffix in (".bin", ".idx") and path.is_file() else prefix


def faults_in_vocabulary(num_outside: int, prefix: str, vocab_size: int) -> Iterator[str]:
    """Yield a fault if tokens are outside the vocabulary."""
    if num_outside:
        yield f"{bin_path(prefix)}: {num_outside} tokens are outside the tokenizer's {vocab_size} ids"


PERCENTILES: Final = (1, 5, 25, 50, 75, 95, 99)
_BLOCK_TOKENS: Final = 1 << 20
# Larger than any vocabulary. A larger id indicates damage and must not determine the size of an array.
_MAX_COUNTED_ID: Final = 1 << 24


@dataclass(frozen=True)
class LengthBin:
    """Histogram bin of documents with lengths from ``low`` to ``high``, inclusive."""

    low: int
    high: int
    documents: int
    tokens: int


@dataclass(frozen=True)
class LengthStatistics:
    """Statistics of the document lengths, in tokens."""

    documents: int
    empty: int
    mean: float
    minimum: int
    maximum: int
    percentiles: dict[int, int]
    histogram: list[LengthBin]


@dataclass(frozen=True)
class TokenStatistics:
    """Statistics of the tokens.

    Attributes:
        counts: count of each id from 0 to the largest one, int64.
        outside: number of tokens that are negative or at least 2**24, and therefore invalid.
        entropy_bits: unigram entropy, in bits per token.
    """

    tokens: int
    counts: NDArray[np.int64]
    outside: int
    entropy_bits: float

    def top(self, number: int) -> list[tuple[int, int]]:
        """Return the most frequent ids with their counts, ties by id."""
        order = np.argsort(-self.counts, kind="stable")[:number]
        return [(int(token), int(self.counts[token])) for token in order if self.counts[token]]

    def num_from(self, vocab_size: int) -> int:
        """Count the tokens outside a vocabulary of this size."""
        return int(self.counts[vocab_size:].sum()) + self.outside


@dataclass(frozen=True)
class EndStatistics:
    """Most frequent last token of documents, its number of documents, and the number of non-empty documents."""

    token: int
    documents: int
    filled: int


def document_lengths(dataset: IndexedDataset) -> NDArray[np.int64]:
    """Return the number of tokens of each document, over all its sequences, as int64 ``[num_documents]``."""
    ends = np.concatenate(([0], np.cumsum(dataset.sequence_lengths, dtype=np.int64)))
    return np.diff(ends[dataset.document_indices])


def describe_lengths(lengths: NDArray[np.int64]) -> LengthStatistics:
    """Compute statistics of document lengths, with a histogram over powers of two."""
    if not len(lengths):
        return LengthStatistics(0, 0, 0.0, 0, 0, {}, [])
    # The bin of a length is its number of bits: 0, 1, 2 to 3, 4 to 7, …
    bins = np.searchsorted(1 << np.arange(62, dtype=np.int64), lengths, side="right")
    documents = np.bincount(bins)
    histogram = []
    for number in range(int(bins.min()), len(documents)):
        low, high = (1 << number) // 2, max((1 << number) - 1, 0)
        tokens = int(lengths[bins == number].sum())
        histogram.append(LengthBin(low, high, int(documents[number]), tokens))
    values = np.percentile(lengths, PERCENTILES, method="lower")
    return LengthStatistics(
        documents=len(lengths),
        empty=int(np.count_nonzero(lengths == 0)),
        mean=float(lengths.mean()),
        minimum=int(lengths.min()),
        maximum=int(lengths.max()),
        percentiles={percent: int(value) for percent, value in zip(PERCENTILES, values)},
        histogram=histogram,
    )


def count_tokens(dataset: IndexedDataset, read: Read = ignore_bytes_read) -> TokenStatistics:
    """Read all tokens in blocks, and count each id."""
    counts = np.zeros(0, np.int64)
    outside = 0
    for block in token_blocks(dataset):
        known = block[(block >= 0) & (block < _MAX_COUNTED_ID)] if block.dtype.kind == "i" else block
        outside += len(block) - len(known)
        found = np.bincount(known)
        if len(found) > len(counts):
            counts = np.concatenate((counts, np.zeros(len(found) - len(counts), np.int64)))
        counts[: len(found)] += found
        read(block.nbytes)
    shares = counts[counts > 0] / max(int(counts.sum()), 1)
    return TokenStatistics(dataset.num_tokens, counts, outside, float(-(shares * np.log2(shares)).sum()) + 0.0)


def token_blocks(dataset: IndexedDataset) -> Iterator[NDArray[Any]]:
    """Yield all tokens of ``.bin`` in file order, in blocks."""
    with open(f"{dataset.prefix}.bin", "rb", buffering=0) as file:
        while data := file.read(_BLOCK_TOKENS * dataset.dtype.itemsize):
            yield np.frombuffer(data[: len(data) // dataset.dtype.itemsize * dataset.dtype.itemsize], dataset.dtype)


def describe_ends(dataset: IndexedDataset) -> EndStatistics | None:
    """Find the token that most documents end with; None if all documents are empty."""
    lengths = document_lengths(dataset)
    last = (np.cumsum(lengths) - 1)[lengths > 0]
    if not len(last):
        return None
    tokens = np.memmap(f"{dataset.prefix}.bin", dataset.dtype, "r")
    found, counts = np.unique(tokens[last], return_counts=True)
    best = int(np.argmax(counts))
    return EndStatistics(int(found[best]), int(counts[best]), len(last))
