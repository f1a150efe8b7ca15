"""The JSON file that makes a folder a checkpoint; reading it needs no torch."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.validation import DamagedCheckpointError
from megatron.core.errors import CheckpointError

INDEX_FILE = "index.json"
FORMAT_VERSION = 1


def read_index_file(folder: Path) -> dict[str, Any]:
    """Return what ``index.json`` holds, the version of its format left out.

    Raises:
        DamagedCheckpointError: it is missing or cannot be understood.
        CheckpointError: a newer version of the format wrote it.
    """
    path = folder / INDEX_FILE
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        version = int(content.pop("format_version"))
    except OSError as error:
        raise DamagedCheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from error
    except ValueError as error:
        raise DamagedCheckpointError(f"{path}: not readable as JSON ({error})") from error
    except (KeyError, TypeError, AttributeError) as error:
        raise DamagedCheckpointError(f"{path}: not an index of a checkpoint ({error!r})") from error
    if version > FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format version {version} is newer than {FORMAT_VERSION}, the newest that this program reads"
        )
    return dict(content)
