"""Index the documents kept so far on disk, by digest and by similarity key."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Final, NamedTuple

from megatron.core.errors import DataError

# What holds memory and time down where very many documents share a key without being duplicates, such as pages of
# one template: the first so many documents of a key are found, and the most promising of all are compared.
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
    """Name a kept document: where its line lies in the output, and where it came from."""

    begin: int
    num_bytes: int
    place: str


class DuplicateIndex:
    """Remember documents in a temporary SQLite file, through a cache of fixed size.

    The file loses its name as soon as it is open, so that a killed process leaves nothing behind.

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
        place = document.place.encode("utf-8", "backslashreplace").decode("utf-8")  # a file's name may be any bytes
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
        """Return kept documents that share keys, those that share most first, then by their order."""
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
