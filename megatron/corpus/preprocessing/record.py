"""The record of finished work, ``PREFIX.preprocessing.json``: the description of the command, and what it wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron.core.datasets.indexed_dataset import bin_path, idx_path


def write_record(path: Path, folder: Path, description: dict[str, Any], prefixes: Sequence[str]) -> None:
    """Record that the data sets of the prefixes are whole; ``folder`` holds the record until it is.

    Raises:
        OSError: it cannot be written.
    """
    unfinished = folder / "record.json"
    unfinished.write_text(json.dumps({"description": description, "bytes": _sizes(prefixes)}) + "\n", encoding="utf-8")
    os.replace(unfinished, path)


def differences(path: Path, description: dict[str, Any], prefixes: Sequence[str]) -> list[str] | None:
    """Name what differs between a command and the one that made the data sets; None where that is not known."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        found: dict[str, Any] = record["description"]
        if record["bytes"] != _sizes(prefixes):
            return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return sorted(name for name in {*found, *description} if found.get(name) != description.get(name))


def _sizes(prefixes: Sequence[str]) -> dict[str, list[int]]:
    """Return the sizes of the files of each data set, by its name."""
    return {Path(prefix).name: [make(prefix).stat().st_size for make in (bin_path, idx_path)] for prefix in prefixes}
