"""Lists of data prefixes and weights that users keep in files."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.core.errors import ConfigurationError

PER_SPLIT_KEYS = ("train", "valid", "test")


def read_data_list(path: str, flag: str) -> tuple[str, ...]:
    """Read the words of a list file (weights and prefixes, on any number of lines).

    Raises:
        ConfigurationError: if the file cannot be read or is empty.
    """
    words = tuple(_read_text(path, flag).split())
    if not words:
        raise ConfigurationError(f"{flag} {path}: the file is empty; write data prefixes, or weight and prefix")
    return words


def read_per_split_lists(path: str, flag: str) -> dict[str, tuple[str, ...]]:
    """Read a JSON object with the lists train, valid and test.

    Raises:
        ConfigurationError: if the file is not such an object.
    """
    try:
        lists = json.loads(_read_text(path, flag))
    except json.JSONDecodeError as error:
        raise ConfigurationError(f"{flag} {path}: not JSON ({error})") from error
    expected = "an object with the lists train, valid and test is expected"
    if not isinstance(lists, dict) or not set(lists) <= set(PER_SPLIT_KEYS):
        raise ConfigurationError(f"{flag} {path}: {expected}")
    if not all(isinstance(words, list) or words is None for words in lists.values()):
        raise ConfigurationError(f"{flag} {path}: {expected}")
    return {key: tuple(str(word) for word in lists.get(key) or ()) for key in PER_SPLIT_KEYS}


def _read_text(path: str, flag: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{flag} {path}: the file cannot be read ({error})") from error
