"""A run that goes on: what its record says of it, as words of a command line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.checkpoint.checkpoint_folder import TRACKER_FILE
from megatron.core.errors import ConfigurationError, StorageError
from megatron.core.object_store import as_path
from megatron.core.safe_io import parse_json, read_plain_text
from megatron.training.loggers.run_record import CONFIG_FILE, CONTINUE_FILE, ENVIRONMENT_FILE, RECORD_FOLDER


@dataclass(frozen=True)
class ContinuedRun:
    """Hold the words that stand before what was typed, the folder that paths are seen from, and the processes."""

    words: tuple[str, ...]
    folder: Path
    nproc: int
    nnodes: int

    @classmethod
    def read(cls, directory: str) -> ContinuedRun:
        """Return what the record in a folder of checkpoints says.

        A run without a checkpoint begins again as it began.

        Raises:
            ConfigurationError: there is no record that can be read.
        """
        try:
            folder = as_path(directory).resolve()
        except StorageError as error:
            raise ConfigurationError(f"--continue: {error}") from error
        record = folder / RECORD_FOLDER
        try:
            environment = parse_json(read_plain_text(record / ENVIRONMENT_FILE))
            nproc, nnodes = (_count(environment, key) for key in ("processes_per_machine", "machines"))
            started_in = Path(str(environment["folder"]))
            is_saved = (folder / TRACKER_FILE).is_file()
        except (OSError, ValueError, KeyError, TypeError, StorageError) as error:
            raise ConfigurationError(
                f"--continue {directory}: {record / ENVIRONMENT_FILE} cannot be read ({_reason(error)}); name the "
                "--save folder of a run of this version, or give its flags with --load"
            ) from error
        config = record / (CONTINUE_FILE if is_saved else CONFIG_FILE)
        words = ["--config", str(config), "--save", str(folder), *(["--load", str(folder)] if is_saved else [])]
        return cls(tuple(words), started_in, nproc, nnodes)


def _count(environment: Mapping[str, Any], key: str) -> int:
    value = environment[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {json.dumps(value)}")
    return value


def _reason(error: Exception) -> str:
    return f"it lacks {error}" if isinstance(error, KeyError) else str(getattr(error, "strerror", None) or error)
