"""Lists of data prefixes and weights, as users type them or keep them in files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from megatron.core.errors import ConfigurationError

PER_SPLIT_KEYS = ("train", "valid", "test")


def parse_blend(values: Sequence[str]) -> tuple[tuple[str, ...], tuple[float, ...] | None]:
    """Return the prefixes and, where they were given, the weights of a list such as ``0.3 a 0.7 b``.

    An odd number of values, or an even one whose first is not a number, is a list of prefixes alone.
    """
    if len(values) % 2 == 0:
        weights = [_number(text) for text in values[::2]]
        known = tuple(weight for weight in weights if weight is not None)
        if weights and len(known) == len(weights):
            return tuple(values[1::2]), known
    return tuple(values), None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


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
