"""Read the local files that a tokenizer is built from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.errors import TokenizerError
from megatron.core.safe_io import parse_json, read_plain_text

ADDED_TOKENS_FILE = "added_tokens.json"
"""Tokens that were added to a vocabulary, with their ids."""
MODEL_FOLDER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    ADDED_TOKENS_FILE,
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "chat_template.json",
)
"""What a Hugging Face model folder says of its tokenizer and of generation, by name."""


def require_path(value: str | Path | None, flag: str, tokenizer_type: str) -> Path:
    """Return the absolute path of what the user named, a file or a folder that exists.

    Raises:
        TokenizerError: the flag was not given, or nothing is at that path.
    """
    if value is None or str(value) == "":
        raise TokenizerError(f"{tokenizer_type} needs {flag}; give the path of a local file")
    path = Path(value)
    if not path.exists():
        raise TokenizerError(
            f"{tokenizer_type}: {path} does not exist; change {flag} (names on a hub are not downloaded)"
        )
    return path.absolute()


def with_companions(*paths: Path) -> tuple[Path, ...]:
    """Return a tokenizer's files and, where they bear the names of a model folder, those that lie beside them."""
    names = [path.name for path in paths]
    if len({path.parent for path in paths}) > 1 or not set(names) <= set(MODEL_FOLDER_FILES):
        return paths
    beside = [paths[0].parent / name for name in MODEL_FOLDER_FILES if name not in names]
    return (*paths, *(path for path in beside if path.is_file()))


def read_added_tokens(folder: Path) -> set[str]:
    """Return the tokens that the files of a model folder list as added to its vocabulary; none where they say nothing.

    Raises:
        TokenizerError: one of the files is not a JSON object.
    """
    names = (ADDED_TOKENS_FILE, "tokenizer_config.json", "special_tokens_map.json")
    by_token, settings, special = (
        read_json_object(folder / name) if (folder / name).is_file() else {} for name in names
    )
    added = set(by_token)
    for entries in (settings.get("added_tokens_decoder"), special):
        for entry in entries.values() if isinstance(entries, dict) else ():
            for token in entry if isinstance(entry, list) else [entry]:
                added.add(str(token.get("content") if isinstance(token, dict) else token))
    return added


def require_file(value: str | Path | None, flag: str, tokenizer_type: str) -> Path:
    """Return the absolute path of a file that exists.

    Raises:
        TokenizerError: as ``require_path``, or the path is a folder.
    """
    path = require_path(value, flag, tokenizer_type)
    if not path.is_file():
        raise TokenizerError(f"{tokenizer_type}: {path} is not a file; change {flag}")
    return path


def read_text(path: Path) -> str:
    """Read a UTF-8 file.

    Raises:
        TokenizerError: the file cannot be read or is not UTF-8.
    """
    try:
        return read_plain_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"cannot read {path}: {error}") from error


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        TokenizerError: the file cannot be read or is not JSON.
    """
    try:
        return parse_json(read_text(path))
    except ValueError as error:
        raise TokenizerError(f"{path} is not valid JSON: {error}") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds one object.

    Raises:
        TokenizerError: as ``read_json``, or the file holds something else.
    """
    value = read_json(path)
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value
