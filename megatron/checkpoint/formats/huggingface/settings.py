"""Read a model folder's config.json and collect all problems: missing, invalid or unsupported settings.

Includes the quantization of the weights. Importing this module does not import torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.safe_io import parse_json, read_plain_text

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Name of the index of weights in several files."""
_MOST_HEADER_BYTES = 100_000_000


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names of a folder's tensors; empty if they cannot be read, which loading the weights then reports."""
    try:
        if (folder / SINGLE_FILE).is_file():
            with open(folder / SINGLE_FILE, "rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = parse_json(stream.read(min(length, _MOST_HEADER_BYTES)))
            return frozenset(header) - {"__metadata__"}
        return frozenset(parse_json(read_plain_text(folder / INDEX_FILE))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"

_DTYPE_KEYS = ("dtype", "torch_dtype")
_MOST, _LARGEST = 2**31 - 1, sys.float_info.max
_DTYPES = ("float32", "bfloat16", "float16", "float64")


class ObservedValues(Mapping[str, Any]):
    """Values of settings, which remember in ``read`` the names that were looked up, whether or not they are there.

    Iteration over the names does not count as a look-up.
    """

    def __init__(self, values: Mapping[str, Any], read: set[str] | None = None) -> None:
        self._values = values
        self.read: set[str] = set() if read is None else read

    def __getitem__(self, name: str) -> Any:
        self.read.add(name)
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def replaced(self, values: Mapping[str, Any]) -> ObservedValues:
        """Return the values with some replaced, and the same memory of what was looked up."""
        return ObservedValues({**self._values, **values}, self.read)


class Settings:
    """Typed access to the values of one JSON object, which collects all problems with them.

    ``tensor_names`` returns the names of the weights, if the settings come with weights. An unusable value is recorded
    in ``problems``, and the default or a placeholder is returned, so that reading continues. `raise_problems` then
    reports all problems.
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

    def replaced(self, values: Mapping[str, Any]) -> Settings:
        """Return the settings with other values for some names; problems are still recorded here."""
        own = self.values
        merged = own.replaced(values) if isinstance(own, ObservedValues) else {**own, **values}
        return Settings(merged, self.place, self.problems, self.tensor_names)

    def refuse(self, problem: str) -> None:
        """Record a problem."""
        self.problems.append(f"{self.place}: {problem}")

    def raise_problems(self) -> None:
        """Raise ConfigurationError if any problem was recorded."""
        if self.problems:
            raise ConfigurationError(self.problems)

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return an integer setting of at least ``least``; null counts as absent."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                self.refuse(f"{name} is missing")
                return 1
            return default
        if type(value) is not int or not least <= value <= _MOST:
            kind = "positive whole number" if least else "whole number from 0"
            self.refuse(f"{name} is {value!r:.40}; a {kind} up to {_MOST} is expected")
            return least
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """Return a setting that must be a number of 0 or more; null counts as absent."""
        value = self.values.get(name)
        if value is None:
            if default is None:
                self.refuse(f"{name} is missing")
                return 1.0
            return default
        if type(value) not in (int, float) or not 0 <= value <= _LARGEST:
            self.refuse(f"{name} is {value!r:.40}; a number of 0 or more is expected")
            return 1.0
        return float(value)

    def positive(self, name: str, default: float) -> float:
        """Return a setting that must be a number above 0; null counts as absent."""
        value = self.number(name, default)
        if value == 0:
            self.refuse(f"{name} is 0; a number greater than 0 is expected")
        return value or default

    def positive_or_none(self, name: str, default: float | None) -> float | None:
        """Return a positive number setting, or None if it is null; if it is absent, the default."""
        value = self.values.get(name, default)
        if value is not None and (type(value) not in (int, float) or not 0 < value <= _LARGEST):
            self.refuse(f"{name} is {value!r:.40}; a number greater than 0 or null is expected")
            return default
        return None if value is None else float(value)

    def positive_numbers(self, name: str, default: tuple[float, ...]) -> tuple[float, ...]:
        """Return a setting that must be a list of as many numbers above 0 as the default; null counts as absent."""
        value = self.values.get(name)
        if value is None:
            return default
        is_list = isinstance(value, list) and len(value) == len(default)
        if not is_list or any(type(each) not in (int, float) or not 0 < each <= _LARGEST for each in value):
            self.refuse(f"{name} is {value!r:.40}; a list of {len(default)} numbers greater than 0 is expected")
            return default
        return tuple(map(float, value))

    def switch(self, name: str, default: bool) -> bool:
        """Return a boolean setting; null counts as absent."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not bool:
            self.refuse(f"{name} is {value!r}; true or false is expected")
            return default
        return value

    def text(self, name: str, default: str) -> str:
        """Return a string setting; null counts as absent."""
        value = self.values.get(name)
        if value is None:
            return default
        if type(value) is not str:
            self.refuse(f"{name} is {value!r}; a string is expected")
            return default
        return value

    def inner(self, name: str) -> Settings | None:
        """Return a nested object, whose problems are recorded here, or None if it is absent."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(f"{name} is {value!r}; an object is expected")
            return None
        return Settings(value, f"{self.place}: {name}", self.problems)

    def require(self, name: str, value: Any, default: Any, reason: str) -> None:
        """Record a problem unless the setting has the only supported value."""
        given = self.values.get(name)
        if given is None:
            given = default
        if given != value or type(given) is not type(value):
            self.refuse(f"{name} is {json.dumps(given)}, but only {json.dumps(value)} is supported: {reason}")

    def require_zero(self, name: str, reason: str) -> None:
        """Record a problem unless the setting is 0, as an integer or not, or absent."""
        value = self.number(name, 0.0)
        if value:
            self.refuse(f"{name} is {value}, but only 0 is supported: {reason}")

    def name_of(self, name: str, other: str) -> str:
        """Return the name, of two for the same setting, that is used; record a problem if their values differ."""
        values = {each: self.values[each] for each in (name, other) if self.values.get(each) is not None}
        if len(values) == 2 and values[name] != values[other]:
            self.refuse(f"{name} is {values[name]!r:.40}, but {other}, another name of it, is {values[other]!r:.40}")
        return next(iter(values), name)

    def dtype(self) -> str | None:
        """Return the name of the weights' dtype, or None if it is not specified."""
        for key in _DTYPE_KEYS:
            value = self.text(key, "").removeprefix("torch.")
            if value in _DTYPES:
                return value
            if value and value != "auto":
                self.refuse(f"{key} is {value!r}; supported values are {', '.join(_DTYPES)}")
        return None


def read_settings(folder: Path) -> Settings:
    """Read a model folder's config.json.

    Raises:
        CheckpointError: the folder has no config.json, or it is not a JSON object.
    """
    return parse_settings(
        read_model_text(folder, CONFIG_FILE), str(folder / CONFIG_FILE), partial(stored_names, folder)
    )


def parse_settings(text: str, place: str, tensor_names: Callable[[], Collection[str]] | None = None) -> Settings:
    """Parse the text of a config.json; ``place`` names it in messages, ``tensor_names`` returns the weights' names.

    Raises:
        CheckpointError: the text is not a JSON object.
    """
    try:
        values = parse_json(text)
    except ValueError as error:
        raise CheckpointError(f"{place} is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{place} contains a JSON {type(values).__name__}; an object is expected")
    return Settings(values, place, tensor_names=tensor_names)


def read_model_text(folder: Path, name: str) -> str:
    """Read a text file of a model folder.

    Raises:
        CheckpointError: there is no such folder or file, or it is not UTF-8.
    """
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; pass the folder of a Hugging Face model on this host")
    try:
        return read_plain_text(folder / name)
    except FileNotFoundError as error:
        raise CheckpointError(f"{folder} is not a Hugging Face model folder: it has no {name}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read {folder / name}: {error}") from error


def dump_settings(values: Mapping[str, Any]) -> str:
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def replace_dtype(values: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Replace the weights' dtype in the settings, under the key that they use."""
    keys: Sequence[str] = [key for key in _DTYPE_KEYS if key in values]
    return dict(values) | dict.fromkeys(keys or ["torch_dtype"], dtype)


@dataclass(frozen=True)
class BlockFloat8:
    """Block-wise FP8 quantization of linear weights, with a scale per block of ``block`` rows and columns.

    ``dtype`` is the name of the dequantized dtype.
    """

    block: tuple[int, int]
    dtype: str


@dataclass(frozen=True)
class BlockFloat4:
    """MXFP4 quantization of expert weights: 4 bits, with an exponent per 32 weights.

    ``dtype`` is the name of the dequantized dtype.
    """

    dtype: str


def read_quantization(settings: Settings) -> BlockFloat8 | BlockFloat4 | None:
    """Return the weights' quantization, or None if they are not quantized; reject unsupported methods."""
    inner = settings.inner("quantization_config")
    if inner is None:
        return None
    method = inner.values.get("quant_method")
    if method == "mxfp4":
        return BlockFloat4(settings.dtype() or "bfloat16")
    if method != "fp8":
        settings.refuse(
            f"quantization_config is set with quant_method {method!r:.40}; supported methods are block-wise fp8 and "
            "mxfp4"
        )
        return None
    block = inner.values.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        inner.refuse(f"weight_block_size is {block!r:.40}; two positive whole numbers are expected")
        return None
    dtype = settings.dtype() or "bfloat16"
    return BlockFloat8((block[0], block[1]), dtype)
