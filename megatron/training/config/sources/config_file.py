"""Configuration files: flags and their values in TOML or YAML, in sections or not."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

from megatron.core.errors import ConfigurationError, StorageError
from megatron.core.object_store import as_path
from megatron.core.safe_io import read_plain_text

_TOML, _YAML = (".toml",), (".yaml", ".yml")


def read_config_file(path: str) -> Mapping[str, Any]:
    """Return what a file gives each key; None is a key's default.

    A section is only a heading: its keys are those of the whole file. Dashes and underscores are the same.

    Raises:
        ConfigurationError: it cannot be read, or is no table of keys and plain values; with every problem found.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in _entries(path, _parse(path)):
        if key in values:
            problems.append(f"--config {path}: {key} is given twice; keep one")
        elif not _is_plain(value):
            problems.append(f"--config {path}: {key} has a value of the kind {type(value).__name__}; {_PLAIN}")
        values[key] = value
    if problems:
        raise ConfigurationError(problems)
    return values


_PLAIN = "give a number, text, true, false or a list of numbers or texts"


def _parse(path: str) -> Any:
    suffix = ""
    try:
        file = as_path(path)  # First: what is wrong with a URL is said without repeating it.
        suffix = file.suffix.lower()
        if suffix not in (*_TOML, *_YAML):
            raise ConfigurationError(f"--config {path} is neither .toml nor .yaml; give a file of one of these kinds")
        text = read_plain_text(file)
        return _from_toml(path, text) if suffix in _TOML else _from_yaml(path, text)
    except OSError as error:
        raise ConfigurationError(f"--config {path} cannot be read: {error.strerror or error}; name a file") from error
    except StorageError as error:
        raise ConfigurationError(f"--config: {error}") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--config {path} is no {suffix[1:].upper()}: {reason}") from error


def _from_toml(path: str, text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ConfigurationError(
                f"--config {path}: TOML with Python 3.10 needs tomli; install it with: pip install tomli"
            ) from error
    return tomllib.loads(text)


def _from_yaml(path: str, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(
            f"--config {path}: YAML needs PyYAML; install it with: pip install pyyaml, or write TOML"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _entries(path: str, table: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key, with underscores, and its value, also of the keys in sections."""
    if table is None:
        return
    if not isinstance(table, dict):
        raise ConfigurationError(f"--config {path} holds no keys; write lines such as num_layers = 24")
    for key, value in table.items():
        if not isinstance(value, dict):
            yield str(key).replace("-", "_"), value
            continue
        for name, item in value.items():
            yield str(name).replace("-", "_"), item


def _is_plain(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, (str, int, float)) for item in items)
