"""Paths of source files as a report shows them."""

from __future__ import annotations

from pathlib import Path


def short_path(path: str) -> str:
    """Return the last folders of a path, from the package's own on."""
    parts = Path(path).parts
    if "megatron" in parts:
        return str(Path(*parts[len(parts) - 1 - parts[::-1].index("megatron") :]))
    return str(Path(*parts[-3:])) if len(parts) > 3 else path
