"""Find duplicate documents: shingles, MinHash keys, and an index of the kept documents on disk."""

from __future__ import annotations

import contextlib
import os
import re
import sqlite3
import zlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megatron.core.errors import ConfigurationError, DataError
from megatron.core.tokenizers import load_package

# Scripts without spaces between words, in which each character counts as a word: Thai, Lao, Burmese, Khmer, kana and
# CJK without punctuation.
_UNSPACED: Final = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff"
    "\u2e80-\u2fff\u3005-\u3007\u3021-\u3029\u3031-\u3035\u3041-\u30fa\u30fc-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
_WORD: Final = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")
_MULTIPLIER: Final = np.uint64(0x9E3779B97F4A7C15)
_BATCH: Final = 1024


def shingles(text: str, num_words: int) -> NDArray[np.uint64]:
    """Hash each n-gram of ``num_words`` words; return the unique hashes in ascending order.

    Case, punctuation and white space are ignored. A shorter text is a single n-gram of all its words. A text without
    words has no n-grams.
    """
    # Use a CRC per word, because Python's hash differs between runs.
    words = np.fromiter(
        (zlib.crc32(word.group().encode("utf-8", "surrogatepass")) for word in _WORD.finditer(text.lower())), np.uint64
    )
    if not len(words):
        return words
    width = min(num_words, len(words))
    hashes = np.zeros(len(words) - width + 1, np.uint64)
    for first in range(width):
        hashes = _mix(hashes + words[first : first + len(hashes)])
    return np.unique(hashes)


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Mix values bijectively over all 64 bits, so that a chain of additions and mixes depends on the word order."""
    values = (values ^ (values >> np.uint64(32))) * _MULTIPLIER
    return values ^ (values >> np.uint64(29))


def similarity(a: NDArray[np.uint64], b: NDArray[np.uint64]) -> float:
    """Return the Jaccard similarity of two sets of shingles: intersection over union."""
    common = len(np.intersect1d(a, b, assume_unique=True))
    return common / max(len(a) + len(b) - common, 1)


class SignatureMaker:
    """MinHash with LSH banding, which maps sets of shingles to keys that similar sets are likely to share.

    Two sets of similarity s share at least one key with probability ``1 - (1 - s**rows)**bands``. Candidates are then
    compared exactly, so false positives only cost time. Bands and rows are chosen accordingly.

    Paper: Broder, "On the resemblance and containment of documents", 1997.

    Raises:
        ConfigurationError: datasketch cannot be imported.
    """

    def __init__(self, threshold: float, num_permutations: int) -> None:
        datasketch = load_package("datasketch", "--deduplicate near", ConfigurationError)
        index = datasketch.MinHashLSH(threshold, num_permutations, weights=(0.0625, 0.9375))
        self.bands, self.rows = int(index.b), int(index.r)
        self._empty: Any = datasketch.MinHash(num_permutations, seed=1, hashfunc=int, scheme="affine32")

    def keys(self, hashes: NDArray[np.uint64]) -> list[int]:
        """Return one 64-bit key per band; none for an empty set."""
        if not len(hashes):
            return []
        signature = self._empty.copy()
        halves = (hashes >> np.uint64(32)).astype(np.uint32)
        for first in range(0, len(halves), _BATCH):
            signature.update_batch(halves[first : first + _BATCH])
        values = signature.digest()[: self.bands * self.rows].astype(np.uint64).reshape(self.bands, self.rows)
        keys = np.arange(1, self.bands + 1, dtype=np.uint64)
        for row in range(self.rows):
            keys = _mix(keys + values[:, row])
        result: list[int] = keys.astype(np.int64).tolist()
        return result


# Limits on memory and time if very many documents share a key without being duplicates, such as pages of one template:
# documents found per key, and candidates compared per document.
MAX_DOCUMENTS_OF_A_KEY: Final = 256
MAX_CANDIDATES: Final = 64
_CACHE_KIB: Final = 128 << 10

_SCHEMA: Final = """
PRAGMA journal_mode = OFF;
PRAGMA synchronous = OFF;
PRAGMA locking_mode = EXCLUSIVE;
CREATE TABLE kept (number INTEGER PRIMARY KEY, begin INTEGER, num_bytes INTEGER, place TEXT);
CREATE TABLE digests (digest BLOB PRIMARY KEY, number INTEGER) WITHOUT ROWID;
CREATE TABLE keys (key INTEGER, number INTEGER, PRIMARY KEY (key, number)) WITHOUT ROWID;
"""


class KeptDocument(NamedTuple):
    """Kept document: the position of its line in the output, and its origin."""

    begin: int
    num_bytes: int
    place: str


class DuplicateIndex:
    """Index of kept documents in a temporary SQLite file, with a cache of fixed size.

    The file is unlinked as soon as it is open, so that a killed process leaves no file.

    Raises:
        DataError: the folder cannot be written.
    """

    def __init__(self, path: Path) -> None:
        try:
            self._database = sqlite3.connect(path, isolation_level=None)
            self._database.executescript(f"PRAGMA cache_size = -{_CACHE_KIB};{_SCHEMA}")
            self._database.execute("BEGIN EXCLUSIVE")
            if os.name == "posix":
                path.unlink()
        except (sqlite3.Error, OSError) as error:
            raise DataError(f"the index of duplicates {path} cannot be written: {error}") from error
        self._path = path
        self._num_kept = 0

    def __enter__(self) -> DuplicateIndex:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._database.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def keep(self, document: KeptDocument, digest: bytes, keys: Sequence[int]) -> None:
        """Add a document that is not a duplicate."""
        number = self._num_kept
        self._num_kept += 1
        place = document.place.encode("utf-8", "backslashreplace").decode("utf-8")  # a file name may hold any bytes
        self._database.execute(
            "INSERT INTO kept VALUES (?, ?, ?, ?)", (number, document.begin, document.num_bytes, place)
        )
        self._database.execute("INSERT INTO digests VALUES (?, ?)", (digest, number))
        self._database.executemany("INSERT INTO keys VALUES (?, ?)", ((key, number) for key in set(keys)))

    def find_digest(self, digest: bytes) -> KeptDocument | None:
        """Return the kept document with this digest."""
        rows = self._database.execute("SELECT number FROM digests WHERE digest = ?", (digest,)).fetchall()
        return self._kept(rows[0][0]) if rows else None

    def find_candidates(self, keys: Sequence[int]) -> list[KeptDocument]:
        """Return kept documents that share keys, sorted by the number of shared keys, then by their order."""
        shared: Counter[int] = Counter()
        for key in keys:
            rows = self._database.execute(
                f"SELECT number FROM keys WHERE key = ? ORDER BY number LIMIT {MAX_DOCUMENTS_OF_A_KEY}", (key,)
            )
            shared.update(number for (number,) in rows)
        best = sorted(shared, key=lambda number: (-shared[number], number))[:MAX_CANDIDATES]
        return [self._kept(number) for number in best]

    def _kept(self, number: int) -> KeptDocument:
        row = self._database.execute("SELECT begin, num_bytes, place FROM kept WHERE number = ?", (number,)).fetchone()
        return KeptDocument(*row)
