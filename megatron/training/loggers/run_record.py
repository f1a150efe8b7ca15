"""Record of a run in its save folder: configuration, software, code and data.

``DIR/run_record`` of ``--save DIR``, which may be in an object store, holds

- ``config.toml``, the resolved configuration; ``continue.toml``, the configuration that resumes from the checkpoints,
- ``arguments.txt``: all arguments, as Megatron prints them,
- ``environment.json``: command line, node, processes, versions, the commit of the code and its local changes,
- ``data.json``: size and checksum of each data file,
- ``starts.jsonl``: a line for each start of the run,
- ``end.json``: how the last start ended; a run that was killed has none.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from megatron.config import RunConfig, TrainingConfig, format_arguments, format_config
from megatron.core.config_base import field_specs
from megatron.core.errors import MegatronError, StorageError
from megatron.core.object_store import ObjectPath, as_path
from megatron.core.ranged_file import open_ranged, read_range
from megatron.core.registry import registered_scripts
from megatron.training import LaunchEnvironment

RECORD_FOLDER = "run_record"
CONFIG_FILE, CONTINUE_FILE, ENVIRONMENT_FILE = "config.toml", "continue.toml", "environment.json"
ARGUMENTS_FILE = "arguments.txt"
SESSION_LIMITS = tuple(spec.name for spec in field_specs(TrainingConfig) if spec.options.role == "session")
"""Fields that end one session of a run early; a continued run does not take them over."""
STARTS_FILE, END_FILE = "starts.jsonl", "end.json"

_PACKAGES = (
    "megatron-gpt",
    "torch",
    "numpy",
    "safetensors",
    "tokenizers",
    "triton",
    "flash-attn",
    "transformer-engine",
)
_GIT_LIMIT_S = 10.0
_MOST_CHANGED = 200
_BLOCKS, _BLOCK_BYTES = 16, 2**16
_JOIN_S = 5.0
_LONGEST_ERROR = 1000


class RunRecord:
    """Record of a run: the configuration is written at once, the rest in a background thread, and the end by `end`.

    If a file cannot be written, a warning is printed and the run continues.
    """

    def __init__(
        self, config: RunConfig, launch: LaunchEnvironment, iteration: int, log: Callable[[str], None]
    ) -> None:
        assert config.checkpoint.save is not None, "there is no record without --save"
        self._folder = as_path(config.checkpoint.save) / RECORD_FOLDER
        self._config, self._launch, self._iteration, self._log = config, launch, iteration, log
        self._started = _now()
        try:
            self._folder.mkdir(exist_ok=True)
            (self._folder / END_FILE).unlink(missing_ok=True)
            self._write(CONFIG_FILE, _described(config, launch))
            self._write(ARGUMENTS_FILE, format_arguments(config) + "\n")
            unlimited: dict[str, Any] = dict.fromkeys(SESSION_LIMITS)
            training = dataclasses.replace(config.training, **unlimited)
            continuing = dataclasses.replace(config, checkpoint=config.checkpoint.resumed(), training=training)
            self._write(CONTINUE_FILE, _described(continuing, launch))
        except (OSError, StorageError) as error:
            self._cannot_write(error)
            return
        self._thread = threading.Thread(target=self._write_rest, name="run record", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait briefly for the background thread."""
        if "_thread" in vars(self):
            self._thread.join(_JOIN_S)

    def end(self, iteration: int, error: BaseException | None) -> None:
        """Close the record, and write the last iteration and the error that ended the run, if there is one."""
        self.close()
        values = {"ended": _now(), "iteration": iteration, "error": None if error is None else _in_one_line(error)}
        try:
            self._write(END_FILE, json.dumps(values) + "\n")
        except (OSError, StorageError) as failure:
            self._cannot_write(failure)

    def _write_rest(self) -> None:
        launch, code = self._launch, _state_of_code()
        start = {"started": self._started, "iteration": self._iteration}
        start |= {"world_size": launch.world_size, "commit": code.get("commit"), **_lengths(self._config)}
        environment = {
            **start,
            "command": sys.argv,
            "scripts": registered_scripts(),
            "folder": os.getcwd(),
            "processes_per_machine": launch.local_world_size,
            "machines": max(1, launch.world_size // launch.local_world_size),
            "host": platform.node(),
            "system": platform.platform(),
            "python": platform.python_version(),
            "packages": dict(_versions()),
            "code": code,
        }
        try:
            self._write(ENVIRONMENT_FILE, json.dumps(environment, indent=1) + "\n")
            self._append(STARTS_FILE, json.dumps(start) + "\n")
            files = {str(path): _checksum(path) for path in _data_files(self._config)}
            self._write("data.json", json.dumps(files, indent=1) + "\n")
        except (OSError, StorageError) as error:
            self._cannot_write(error)

    def _write(self, name: str, text: str) -> None:
        if isinstance(self._folder, ObjectPath):
            (self._folder / name).write_bytes(text.encode())  # atomic
            return
        hidden = self._folder / f".{name}.{os.getpid()}"
        hidden.write_text(text, encoding="utf-8")
        hidden.replace(self._folder / name)

    def _append(self, name: str, line: str) -> None:
        path = self._folder / name
        if isinstance(path, ObjectPath):
            # Only the run that owns the folder writes here.
            path.write_bytes((path.read_bytes() if path.is_file() else b"") + line.encode())
            return
        with path.open("a", encoding="utf-8") as file:
            file.write(line)

    def _cannot_write(self, error: OSError | StorageError) -> None:
        self._log(f"WARNING: --save {self._folder.parent}: the run record cannot be written: {error}")


def _now() -> str:
    return datetime.now().isoformat(timespec="seconds")


def _lengths(config: RunConfig) -> dict[str, int | None]:
    """Return the numbers from which a reader can tell how far the run is, and how long it may be silent."""
    return {
        "train_iters": config.train_iters,
        "eval_interval": config.validation.eval_interval,
        "save_interval": config.checkpoint.save_interval,
        "hang_timeout_seconds": config.initialization.hang_timeout_seconds,
    }


def _in_one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())[:_LONGEST_ERROR]
    return text if text and isinstance(error, MegatronError) else f"{type(error).__name__}: {text}".removesuffix(": ")


def _described(config: RunConfig, launch: LaunchEnvironment) -> str:
    heading = f"The resolved configuration of a run on {launch.world_size} process(es); --config reads it."
    return format_config(config, (heading,), with_help=False)


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _state_of_code() -> dict[str, Any]:
    """Return the commit of the checkout that contains this code and its local changes; empty outside of a checkout."""
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        command = ["git", "-C", str(folder), *words]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_LIMIT_S, check=True)
        return done.stdout.rstrip()

    try:
        if not git("ls-files", "--", __file__):
            return {}  # an installed package within the checkout of another project
        changed = git("status", "--porcelain", "--untracked-files=no").splitlines()
        found = {"commit": git("rev-parse", "HEAD"), "branch": git("rev-parse", "--abbrev-ref", "HEAD")}
        return {**found, "changed": changed[:_MOST_CHANGED]}
    except (OSError, subprocess.SubprocessError):
        return {}


def _data_files(config: RunConfig) -> Iterator[Path]:
    data = config.data
    words = (*data.data_path, *data.train_data_path, *data.valid_data_path, *data.test_data_path)
    for word in dict.fromkeys((*words, *config.validation.extra_valid_datalist)):
        for path in (as_path(word), as_path(f"{word}.idx"), as_path(f"{word}.bin")):
            if path.is_file():
                yield path


def _checksum(path: Path) -> dict[str, Any]:
    """Return a file's size and the SHA-256 of evenly spread blocks, which cover all of a file of up to 1 MiB."""
    with contextlib.closing(open_ranged(path)) as file:
        size = file.num_bytes
        step = max(_BLOCK_BYTES, (size - _BLOCK_BYTES) // (_BLOCKS - 1))
        digest = hashlib.sha256(str(size).encode())
        for place in range(0, size, step):
            digest.update(read_range(file, place, _BLOCK_BYTES))
    whole = size <= _BLOCKS * _BLOCK_BYTES
    return {"bytes": size, "sha256_of_blocks": digest.hexdigest(), "covers": "all" if whole else f"{_BLOCKS} blocks"}
