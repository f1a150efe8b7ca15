"""Read a model folder's config.json with every problem collected: missing, of a wrong type, or unsupported.

Includes how the weights are quantized. Importing this module imports no torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.safe_io import parse_json, read_plain_text

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_HEADER_BYTES = 100_000_000


def stored_names(folder: Path) -> frozenset[str]:
    """Return the names; none where the files cannot be read, of which whoever reads the weights says more."""
    try:
        if (folder / _SINGLE).is_file():
            with open(folder / _SINGLE, "rb") as stream:
                length = int.from_bytes(stream.read(8), "little")
                header = parse_json(stream.read(min(length, _MOST_HEADER_BYTES)))
            return frozenset(header) - {"__metadata__"}
        return frozenset(parse_json(read_plain_text(folder / _INDEX))["weight_map"])
    except (OSError, ValueError, KeyError, TypeError):
        return frozenset()


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
    return json.dumps(values, indent=2, sort_keys=True) + "\n"


def replace_dtype(values: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the settings with the weights' dtype changed, under the name that they use for it."""
    keys: Sequence[str] = [key for key in _DTYPE_KEYS if key in values]
    return dict(values) | dict.fromkeys(keys or ["torch_dtype"], dtype)


@dataclass(frozen=True)
class BlockFloat8:
    """Say that linear weights are of 8 bits, with a factor for each block of so many rows and columns.

    ``dtype`` is the name of the dtype that they are read as.
    """

    block: tuple[int, int]
    dtype: str


@dataclass(frozen=True)
class BlockFloat4:
    """Say that weights of experts are of 4 bits, with an exponent for each 32 of them (MXFP4).

    ``dtype`` is the name of the dtype that they are read as.
    """

    dtype: str


def read_quantization(settings: Settings) -> BlockFloat8 | BlockFloat4 | None:
    """Return how weights are quantized, None where they are not; note a way that is not known."""
    inner = settings.inner("quantization_config")
    if inner is None:
        return None
    method = inner.values.get("quant_method")
    if method == "mxfp4":
        return BlockFloat4(settings.dtype() or "bfloat16")
    if method != "fp8":
        settings.refuse(
            f"quantization_config is set with quant_method {method!r:.40}; supported are fp8 in blocks and mxfp4"
        )
        return None
    block = inner.values.get("weight_block_size")
    if not (isinstance(block, list) and len(block) == 2 and all(type(size) is int and size > 0 for size in block)):
        inner.refuse(f"weight_block_size is {block!r:.40}; two positive whole numbers are expected")
        return None
    dtype = settings.dtype() or "bfloat16"
    return BlockFloat8((block[0], block[1]), dtype)
