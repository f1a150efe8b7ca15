"""Findings of a GPU window: one JSON object per line, written at once. This module imports no torch."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PASSED, FAILED = "passed", "failed"
RECORDED = "recorded"
"""A figure or a fact that is right or wrong for nobody."""
UNSUPPORTED = "unsupported"
"""This GPU type or this torch cannot do it; the reason says why."""
UNAVAILABLE = "unavailable"
"""There is no GPU, or no torch."""
SKIPPED = "skipped"
"""Not tried, because the time of the part was up or because the emulator cannot show it."""
STATUSES = (PASSED, FAILED, RECORDED, UNSUPPORTED, UNAVAILABLE, SKIPPED)

COMPLETED, TIMED_OUT, CRASHED = "completed", "timed out", "crashed"
NOT_RUN = "not run"
PART_STATUSES = (COMPLETED, TIMED_OUT, CRASHED, UNAVAILABLE, NOT_RUN)

Line = dict[str, Any]


def append_line(path: Path, line: Line) -> None:
    """Append one object to a file of JSON lines, in one write that a killed process cannot tear."""
    text = json.dumps(line, allow_nan=False, default=str) + "\n"
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, text.encode())
    finally:
        os.close(descriptor)


def finite(value: Any) -> Any:
    """Return a value as JSON can hold it: numbers that are NaN or infinite, also within lists and dicts, as text."""
    if isinstance(value, dict):
        return {key: finite(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(each) for each in value]
    return str(value) if isinstance(value, float) and value - value != 0.0 else value


def read_lines(path: Path) -> tuple[list[Line], int]:
    """Return the objects of a file and how many of its lines are none: a machine that goes down may tear the last."""
    lines: list[Line] = []
    torn = 0
    for text in path.read_text(errors="replace").splitlines():
        try:
            line = json.loads(text)
        except ValueError:
            torn += 1
            continue
        if isinstance(line, dict):
            lines.append(line)
        else:
            torn += 1
    return lines, torn


def of_kind(lines: list[Line], kind: str) -> Iterator[Line]:
    """Yield the lines of a kind: ``window``, ``device``, ``finding`` or ``part``."""
    return (line for line in lines if line.get("kind") == kind)
