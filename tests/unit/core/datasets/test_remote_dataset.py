"""Data in an object store: the same tokens and the same index arrays, in as few requests as is worth while."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from megatron.core import object_store
from megatron.core.datasets.index_cache import Arrays, IndexCache
from megatron.core.datasets.indexed_dataset import IndexedDataset, bin_path, idx_path
from megatron.core.errors import DataError, InputError, StorageError
from megatron.core.object_store import ObjectPath, ReadAheadFile, as_path
from tests.e2e.toy_run import DATA
from tests.harness.object_faults import MEMORY, Unreachable, empty_memory_store

PREFIX = "memory://data/text"


@pytest.fixture(autouse=True)
def reads(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[tuple[str, int, int]]]:
    """Give a store with a data set in it and copies of its own; the list grows by each range that is read."""
    monkeypatch.setattr(object_store, "_DELAYS_S", ())
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with empty_memory_store():
        for local, remote in ((bin_path(DATA), bin_path(PREFIX)), (idx_path(DATA), idx_path(PREFIX))):
            remote.write_bytes(local.read_bytes())
        found: list[tuple[str, int, int]] = []
        real = MEMORY.cat_file

        def read(self, path, start, end):
            found.append((path.rpartition(".")[2], start, end))
            return real(self, path, start, end)

        monkeypatch.setattr(MEMORY, "cat_file", read)
        yield found


def test_the_tokens_are_those_of_a_local_data_set() -> None:
    local, remote = IndexedDataset(DATA), IndexedDataset(PREFIX)
    assert len(remote) == len(local)
    assert remote.lengths_fingerprint == local.lengths_fingerprint
    for number in (0, 17, len(local) - 1, 3):
        assert np.array_equal(remote[number], local[number])
        assert np.array_equal(remote.get(number, 1, 2), local.get(number, 1, 2))
    assert np.array_equal(pickle.loads(pickle.dumps(remote))[5], local[5])
    remote.verify_structure()


def test_an_index_is_fetched_once_and_tokens_are_read_ahead(reads) -> None:
    for _ in range(3):
        data = IndexedDataset(PREFIX)
        for number in range(len(data)):
            data[number]
    kinds = [kind for kind, _, _ in reads]
    assert kinds.count("idx") == 1
    assert kinds.count("bin") == 3


def test_who_reads_on_gets_more_and_who_jumps_little(reads, monkeypatch) -> None:
    monkeypatch.setattr(object_store, "_FIRST_BYTES", 100)
    monkeypatch.setattr(object_store, "_MOST_BYTES", 400)
    path = as_path("memory://data/long.bin")
    assert isinstance(path, ObjectPath)
    data = bytes(range(250)) * 40
    path.write_bytes(data)
    file = ReadAheadFile(path)
    for start in range(0, 1400, 20):
        assert file.read(start, 20) == data[start : start + 20]
    assert file.read(9000, 20) == data[9000:9020]
    assert [(start, end) for _, start, end in reads] == [
        (0, 100),
        (100, 300),
        (300, 700),
        (700, 1100),
        (1100, 1500),
        (9000, 9100),
    ]
    assert file.read(9990, 50) == data[9990:]
    assert file.read(9100, 300) == data[9100:9400]
    assert file.read(20_000, 5) == b""


def test_a_data_set_that_is_not_there_or_not_whole_is_told(monkeypatch) -> None:
    with pytest.raises(DataError, match=r"^data file memory://data/none\.idx does not exist"):
        IndexedDataset("memory://data/none")
    bin_path(PREFIX).write_bytes(bin_path(PREFIX).read_bytes()[:-2])
    with pytest.raises(DataError, match=r"memory://data/text\.bin is truncated"):
        IndexedDataset(PREFIX)
    with pytest.raises(StorageError, match="hdfs:// is not a supported object store"):
        IndexedDataset("hdfs://host/text")


def test_a_store_that_does_not_answer_is_told_in_a_line(monkeypatch) -> None:
    data = IndexedDataset(PREFIX)

    def fail(self, path, start, end):
        raise Unreachable("reset by peer")

    monkeypatch.setattr(MEMORY, "cat_file", fail)
    with pytest.raises(InputError, match=r"^memory://data/text\.bin: reset by peer$"):
        data[3]


def arrays_of(cache: IndexCache, built: list[str]) -> Arrays:
    def build() -> Arrays:
        built.append("again")
        return {"a": np.arange(7), "b": np.arange(3.0)}

    return cache.load_or_build("kind", ("a", "b"), {"seed": 1}, build, lambda _: None).arrays


def test_an_index_built_by_one_machine_is_fetched_by_others(tmp_path: Path, monkeypatch) -> None:
    built: list[str] = []
    lines: list[str] = []
    for machine in ("first", "second", "first", "third"):
        monkeypatch.setenv("HOME", str(tmp_path / machine))
        arrays = arrays_of(IndexCache("memory://cache/indices", lines.append), built)
        assert np.array_equal(arrays["a"], np.arange(7))
        assert np.array_equal(arrays["b"], np.arange(3.0))
        if machine == "second":
            # What is incomplete in the store is not an index; the first machine has its own.
            next(as_path("memory://cache/indices").glob("*description.txt")).unlink()
    assert built == ["again", "again"]
    assert lines == []
    assert len(list(as_path("memory://cache/indices").iterdir())) == 3


def test_a_cache_in_a_store_that_does_not_answer_is_done_without(tmp_path: Path, monkeypatch) -> None:
    def fail(self, *words, **named):
        raise Unreachable("reset by peer")

    for name in ("info", "open"):
        monkeypatch.setattr(MEMORY, name, fail)
    built: list[str] = []
    lines: list[str] = []
    assert len(arrays_of(IndexCache("memory://cache/indices", lines.append), built)["a"]) == 7
    assert built == ["again"]
    assert [line.partition(" (")[0] for line in lines] == [
        "WARNING: index cache memory://cache/indices cannot be read",
        "WARNING: index cache memory://cache/indices cannot be written",
    ]
