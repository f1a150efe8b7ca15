"""Record a tokenizer in a checkpoint, as a description and copies of its files, and rebuild it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.core.errors import TokenizerError
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.core.tokenizers.tokenizer import Tokenizer, read_json_object

TOKENIZER_FOLDER = "tokenizer"
RECORD_FILE = "tokenizer_record.json"
_RECORD_VERSION = 1
PATH_ARGUMENTS = ("vocab_file", "merge_file", "tokenizer_model")
"""Keyword arguments of `build_tokenizer` that are paths, in the order of a tokenizer's files."""


def describe_tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """Describe a tokenizer in JSON values: type, sizes, keyword arguments to build it, and files with checksums.

    Each file has the unique ``name`` of its copy.

    Raises:
        TokenizerError: a file can no longer be read.
    """
    names: list[str] = []
    for path in tokenizer.files:
        names.append(path.name if path.name not in names else f"{len(names)}-{path.name}")
    return {
        "record_version": _RECORD_VERSION,
        "tokenizer_type": tokenizer.name,
        "vocab_size": tokenizer.vocab_size,
        "eod_id": tokenizer.eod_id,
        "arguments": dict(tokenizer.arguments),
        "files": [
            {"name": name, "path": str(path), "sha256": _sha256(path)}
            for name, path in zip(names, tokenizer.files, strict=True)
        ],
    }


def record_tokenizer(tokenizer: Tokenizer, folder: Path) -> dict[str, Any]:
    """Write the description and copies of the files to ``folder/tokenizer`` and return the description.

    Only one process may write. The caller must publish the folder atomically.

    Raises:
        TokenizerError: a file can no longer be read.
    """
    record = describe_tokenizer(tokenizer)
    target = folder / TOKENIZER_FOLDER
    target.mkdir(parents=True, exist_ok=True)
    for path, entry in zip(tokenizer.files, record["files"], strict=True):
        copy = target / entry["name"]
        shutil.copyfile(path, copy)
        if _sha256(copy) != entry["sha256"]:
            raise TokenizerError(f"{path} changed while it was copied to {copy}; save the checkpoint again")
    (target / RECORD_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return record


def load_recorded_tokenizer(folder: Path) -> Tokenizer:
    """Build the tokenizer that `record_tokenizer` wrote to a folder.

    Raises:
        TokenizerError: there is no record, or as ``rebuild_tokenizer``.
    """
    path = folder / TOKENIZER_FOLDER / RECORD_FILE
    if not path.is_file():
        raise TokenizerError(f"{folder} records no tokenizer ({path} is missing); pass --tokenizer-type and its files")
    return rebuild_tokenizer(read_json_object(path), folder / TOKENIZER_FOLDER)


def rebuild_tokenizer(record: Mapping[str, Any], copies: Path | None = None) -> Tokenizer:
    """Rebuild the recorded tokenizer from the copies of its files if they exist, else from the originals.

    Raises:
        TokenizerError: the record is damaged, files are missing or have changed, or the rebuilt tokenizer
            differs from the record.
    """
    arguments = recorded_arguments(record, copies)
    try:
        expected = (record["vocab_size"], record["eod_id"])
        tokenizer = build_tokenizer(**arguments)
    except (KeyError, TypeError) as error:
        raise TokenizerError(f"the tokenizer record is damaged: {error!r}") from error
    if (tokenizer.vocab_size, tokenizer.eod_id) != expected:
        raise TokenizerError(
            f"the tokenizer has {tokenizer.vocab_size} ids and end-of-document id {tokenizer.eod_id}, but the "
            f"checkpoint was trained with {expected[0]} and {expected[1]}"
        )
    return tokenizer


def recorded_arguments(record: Mapping[str, Any], copies: Path | None = None) -> dict[str, Any]:
    """Return the recorded keyword arguments of `build_tokenizer`, with the paths of existing files.

    Raises:
        TokenizerError: the record is damaged, or files are missing or have changed.
    """
    try:
        if record["record_version"] != _RECORD_VERSION:
            raise TokenizerError(
                f"the tokenizer record has version {record['record_version']}; version {_RECORD_VERSION} is expected"
            )
        entries = list(record["files"])
        arguments = dict(record["arguments"])
        found = _find_files(entries, copies)
        recorded = {entry["path"]: path for entry, path in zip(entries, found, strict=True)}
    except (KeyError, TypeError) as error:
        raise TokenizerError(f"the tokenizer record is damaged: {error!r}") from error
    for name in PATH_ARGUMENTS:
        value = arguments.get(name)
        if value is not None:
            # If the path is not a recorded file, it is the folder of the files.
            arguments[name] = str(recorded[value] if value in recorded else found[0].parent)
    return arguments


def _find_files(entries: Sequence[Mapping[str, Any]], copies: Path | None) -> list[Path]:
    """Locate the recorded files, all copies or all originals, and verify their checksums."""
    places = [[copies / entry["name"] for entry in entries]] if copies is not None else []
    places.append([Path(entry["path"]) for entry in entries])
    for paths in places:
        if not all(path.is_file() for path in paths):
            continue
        for path, entry in zip(paths, entries, strict=True):
            if _sha256(path) != entry["sha256"]:
                raise TokenizerError(f"{path} is not the file that was recorded: its SHA-256 differs")
        return paths
    looked = ", ".join(str(path) for paths in places for path in paths if not path.is_file())
    raise TokenizerError(
        f"files of the recorded tokenizer are missing: {looked}; restore them or pass --tokenizer-type"
    )


def _sha256(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error
