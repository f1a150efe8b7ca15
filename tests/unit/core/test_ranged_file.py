"""Small ranges of an object: which requests they become."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from megatron.core import object_store
from megatron.core.object_store import ObjectPath, ReadAheadFile
from megatron.core.ranged_file import open_ranged
from tests.harness.object_faults import empty_memory_store
from tests.harness.recorded_calls import record_object_reads

DATA = bytes(range(250)) * 4


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[int, int]]]:
    """Note the ranges that the store is asked for; windows are of 10 to 40 bytes, and two are kept."""
    for name, value in (("_FIRST_BYTES", 10), ("_MOST_BYTES", 40), ("_NUM_WINDOWS", 2)):
        monkeypatch.setattr(object_store, name, value)
    asked = record_object_reads(monkeypatch)
    with empty_memory_store():
        ObjectPath("memory://a/b").write_bytes(DATA)
        yield asked


def read(file: ReadAheadFile, start: int, num_bytes: int) -> None:
    assert file.read(start, num_bytes) == DATA[start : start + num_bytes]


def test_windows_grow_where_they_are_gone_on_with(requests: list[tuple[int, int]]) -> None:
    file = ReadAheadFile(ObjectPath("memory://a/b"))
    for start, num_bytes in ((100, 4), (100, 10), (106, 4), (110, 4), (128, 4), (168, 4)):
        read(file, start, num_bytes)
    assert requests == [(100, 110), (110, 130), (128, 168), (168, 208)]
    requests.clear()
    read(file, 300, 100)
    read(file, 990, 20)
    read(file, 1000, 4)
    read(file, 500, 0)
    assert requests == [(300, 400), (990, 1000)]


def test_the_window_that_was_not_read_for_longest_is_forgotten(requests: list[tuple[int, int]]) -> None:
    file = ReadAheadFile(ObjectPath("memory://a/b"))
    for start in (100, 200, 105, 300, 104, 204):
        read(file, start, 4)
    assert requests == [(100, 110), (200, 210), (300, 310), (204, 214)]


def test_a_longer_range_from_where_a_window_begins_takes_its_place(requests: list[tuple[int, int]]) -> None:
    file = ReadAheadFile(ObjectPath("memory://a/b"))
    for start, num_bytes in ((100, 4), (200, 4), (100, 12), (300, 4), (104, 16)):
        read(file, start, num_bytes)
    assert requests == [(100, 110), (200, 210), (100, 120), (300, 310)]


def test_a_single_run_is_not_read_before_it_is_needed(requests: list[tuple[int, int]]) -> None:
    file = open_ranged(ObjectPath("memory://a/b"))
    assert list(file.announce(100, 4, [3])) == [3]
    assert requests == []
    assert list(file.announce(100, 4, [3, 9])) == [3, 9]
    assert requests == [(103, 113)]


def test_windows_of_sequential_reads_grow_from_128_kib_to_8_mib_and_8_are_kept() -> None:
    asked: list[tuple[int, int]] = []

    def read_of_store(url: str, start: int, end: int) -> bytes:
        asked.append((start, end - start))
        return bytes(end - start)

    store = SimpleNamespace(size=lambda url: 1 << 40, read=read_of_store)
    file = ReadAheadFile(SimpleNamespace(store=store))  # type: ignore[arg-type]
    position = 0
    for _ in range(8):
        file.read(position, 10)
        position = sum(asked[-1])
    assert [num_bytes for _, num_bytes in asked] == [(128 << 10) << n for n in range(7)] + [8 << 20]
    asked.clear()
    for start in [*range(1 << 30, (1 << 30) + (9 << 20), 1 << 20), (1 << 30) + (1 << 20), 1 << 30]:
        file.read(start, 10)
    assert [start - (1 << 30) for start, _ in asked] == [*range(0, 9 << 20, 1 << 20), 0]
    assert {num_bytes for _, num_bytes in asked} == {128 << 10}
