"""A config.json, read with every problem collected: what is missing, of a wrong type, or not supported."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.safe_io import parse_json, read_plain_text
from megatron.interop.huggingface.stored.stored_names import stored_names

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

_DTYPE_KEYS = ("dtype", "torch_dtype")
_MOST, _LARGEST = 2**31 - 1, sys.float_info.max
_DTYPES = ("float32", "bfloat16", "float16", "float64")


class Settings:
    """Hand out the values of one JSON object and note what is wrong with them.

    ``tensor_names`` gives those of the weights, where there are some beside the settings.

    A value that cannot be used is noted in ``problems``, and the default, or a stand-in, is returned so that reading
    goes on; `raise_problems` then reports all of them.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        place: str,
        problems: list[str] | None = None,
        tensor_names: Callable[[], Collection[str]] | None = None,
    ) -> None:
        self.values = values
        self.place = place
        self.tensor_names = tensor_names
        self.problems: list[str] = [] if problems is None else problems

    def refuse(self, problem: str) -> None:
        """Note a problem."""
        self.problems.append(f"{self.place}: {problem}")

    def raise_problems(self) -> None:
        """Raise ConfigurationError if anything was noted."""
        if self.problems:
            raise ConfigurationError(self.problems)

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a positive whole number; null counts as absent."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                self.refuse(f"{name} is missing")
                return 1
            return default
        if type(value) is not int or not 1 <= value <= _MOST:
            self.refuse(f"{name} is {value!r:.40}; a positive whole number up to {_MOST} is expected")
            return 1
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number that is not negative; null counts as absent."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                self.refuse(f"{name} is missing")
                return 1.0
            return default
        if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
            self.refuse(f"{name} is {value!r:.40}; a number that is not negative is expected")
            return 1.0
        return float(value)

    def positive_or_none(self, name: str, default: float | None) -> float | None:
        """Return a number greater than 0; null, unlike absence, stands for none."""
        value = self.values.get(name, default)
        if value is not None and (type(value) not in (int, float) or not 0 < value <= _LARGEST):
            self.refuse(f"{name} is {value!r:.40}; a number greater than 0 or null is expected")
            return default
        return None if value is None else float(value)

    def switch(self, name: str, default: bool) -> bool:
        """Return true or false; null counts as absent."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(f"{name} is {value!r}; true or false is expected")
            return default
        return value

    def text(self, name: str, default: str) -> str:
        """Return a text; null counts as absent."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not str:
            self.refuse(f"{name} is {value!r}; a text is expected")
            return default
        return value

    def inner(self, name: str) -> Settings | None:
        """Return the object of that name, its problems noted here, or None where there is none."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(f"{name} is {value!r}; an object is expected")
            return None
        return Settings(value, f"{self.place}: {name}", self.problems)

    def require(self, name: str, value: Any, default: Any, reason: str) -> None:
        """Note a problem unless the setting has the only value that is supported."""
        given = self.values.get(name)
        if given is None:
            given = default
        if given != value or type(given) is not type(value):
            self.refuse(f"{name} is {json.dumps(given)}, supported is {json.dumps(value)}: {reason}")

    def dtype(self) -> str | None:
        """Return the name of the weights' dtype, or None where it is not said."""
        for key in _DTYPE_KEYS:
            value = self.text(key, "").removeprefix("torch.")
            if value in _DTYPES:
                return value
            if value and value != "auto":
                self.refuse(f"{key} is {value!r}; supported are {', '.join(_DTYPES)}")
        return None


def read_settings(folder: Path) -> Settings:
    """Read a model folder's config.json.

    Raises:
        CheckpointError: the folder has none, or it is not a JSON object.
    """
    return parse_settings(
        read_model_text(folder, CONFIG_FILE), str(folder / CONFIG_FILE), partial(stored_names, folder)
    )


def parse_settings(text: str, place: str, tensor_names: Callable[[], Collection[str]] | None = None) -> Settings:
    """Read the text of a config.json; ``place`` names it in messages, ``tensor_names`` gives those of the weights.

    Raises:
        CheckpointError: it is not a JSON object.
    """
    try:
        values = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{place} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{place} holds a JSON {type(values).__name__}, not an object")
    return Settings(values, place, tensor_names=tensor_names)


def read_model_text(folder: Path, name: str) -> str:
    """Read one of the text files of a model folder.

    Raises:
        CheckpointError: there is no such folder or file, or it is not UTF-8.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder} is not a folder; give the path of a Hugging Face model's folder on this machine"
        )
    try:
        return read_plain_text(folder / name)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a Hugging Face model folder: it has no {name}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {folder / name}: {error}") from error


def dump_settings(values: Mapping[str, Any]) -> str:
    """Return the text of a JSON file as Hugging Face's own tools lay it out."""
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def replace_dtype(values: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the settings with the weights' dtype changed, under the name that they use for it."""
    keys: Sequence[str] = [key for key in _DTYPE_KEYS if key in values]
    return dict(values) | dict.fromkeys(keys or ["torch_dtype"], dtype)
