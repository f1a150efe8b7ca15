"""Record what the code under test opens and reads."""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests.harness.object_faults import MEMORY


def record_opened(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets each file descriptor that `os.open` returns."""
    opened: list[int] = []
    real = os.open

    def record(*arguments: Any) -> int:
        opened.append(real(*arguments))
        return opened[-1]

    monkeypatch.setattr(os, "open", record)
    return opened


def record_object_reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Return a list that gets the first byte and the end of each range that is read from the store in memory."""
    ranges: list[tuple[int, int]] = []
    real = MEMORY.cat_file

    def cat_file(self: Any, path: str, start: int, end: int) -> bytes:
        ranges.append((start, end))
        data: bytes = real(self, path, start, end)
        return data

    monkeypatch.setattr(MEMORY, "cat_file", cat_file)
    return ranges
