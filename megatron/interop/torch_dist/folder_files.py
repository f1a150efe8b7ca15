"""The files that make a folder a checkpoint of this format; importing their names imports no torch."""

from __future__ import annotations

from pathlib import Path

METADATA_FILE = ".metadata"
COMMON_FILE = "common.pt"
BACKEND_FILE = "metadata.json"


def is_torch_dist(folder: Path) -> bool:
    """Return whether a folder is an iteration's checkpoint in this format, whole or not."""
    return (folder / METADATA_FILE).is_file() or (folder / COMMON_FILE).is_file()
