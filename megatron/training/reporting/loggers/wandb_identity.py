"""Which run of Weights & Biases the figures of a save folder belong to, through all its restarts."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path

from megatron.core.errors import ConfigurationError
from megatron.core.object_store import ObjectPath

FILE = "wandb_run.json"


def identify_run(folder: Path, project: str, entity: str) -> str:
    """Return the id of the run that a save folder has in a project; one that is new is kept in the folder.

    ``folder`` is one of a file system or of an object store.

    Raises:
        ConfigurationError: the folder's file holds no ids.
        OSError: it cannot be read or written.
    """
    path = folder / FILE
    known = _read(path) if path.exists() else {}
    place = f"{entity}/{project}" if entity else project
    if place not in known:
        known[place] = secrets.token_hex(4)
        _write(path, (json.dumps(known, indent=2) + "\n").encode())
    return known[place]


def _write(path: Path, data: bytes) -> None:
    """Write a file that is whole at any moment, which an object always is."""
    if isinstance(path, ObjectPath):
        path.write_bytes(data)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{FILE}.new")
    written.write_bytes(data)
    os.replace(written, path)


def _read(path: Path) -> dict[str, str]:
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{path} is damaged ({error}); remove it to begin a new run of W&B") from error
    if not isinstance(known, dict) or not all(isinstance(value, str) and value for value in known.values()):
        raise ConfigurationError(f"{path} holds no ids of runs; remove it to begin a new run of W&B")
    return known
