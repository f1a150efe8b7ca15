"""Lists of data prefixes and weights that users keep in files."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron.core.datasets.gpt_dataset_config import ValidationSet, parse_blend
from megatron.core.errors import ConfigurationError
from megatron.core.safe_io import MAX_TEXT_BYTES, parse_json
from megatron.training.config.training_config import ValidationConfig

PER_SPLIT_KEYS = ("train", "valid", "test")
RESERVED_NAMES = ("train", "validation", "valid", "test")
"""What evaluations are called without being named."""

_DATALIST = "--extra-valid-datalist"


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
        lists = parse_json(_read_text(path, flag))
    except ValueError as error:
        raise ConfigurationError(f"{flag} {path}: not JSON ({error})") from error
    expected = "an object with the lists train, valid and test is expected"
    if not isinstance(lists, dict) or not set(lists) <= set(PER_SPLIT_KEYS):
        raise ConfigurationError(f"{flag} {path}: {expected}")
    if not all(isinstance(words, list) or words is None for words in lists.values()):
        raise ConfigurationError(f"{flag} {path}: {expected}")
    return {key: tuple(str(word) for word in lists.get(key) or ()) for key in PER_SPLIT_KEYS}


def extra_validation_sets(validation: ValidationConfig) -> tuple[ValidationSet, ...]:
    """Return the validation sets of ``--extra-valid-datalist``, by name; without a number, or in full, all of each.

    A value that is no file but the prefix of a data set stands for itself. A set without a name is called after its
    list.

    Raises:
        ConfigurationError: a list cannot be used, or the flags do not fit together.
    """
    lists = validation.extra_valid_datalist
    samples, names = validation.extra_valid_data_samples, validation.extra_valid_data_names
    problems = list(_find_misfits(lists, samples, names))
    if problems:
        raise ConfigurationError(problems)
    names = names or tuple(Path(path).name for path in lists)
    numbers = [None] * len(lists) if validation.full_validation or not samples else list(samples)
    sets = []
    for path, name, number in zip(lists, names, numbers):
        is_prefix = Path(path).suffix == ".jsonl" or (not os.path.exists(path) and os.path.exists(f"{path}.idx"))
        try:
            words = (path,) if is_prefix else read_data_list(path, _DATALIST)
        except ConfigurationError as error:
            problems.extend(error.problems)
            continue
        try:
            sets.append(ValidationSet(name, parse_blend(words), number))
        except ConfigurationError as error:
            problems.extend(f"{_DATALIST} {path}: {problem}" for problem in error.problems)
    if problems:
        raise ConfigurationError(problems)
    return tuple(sets)


def _find_misfits(lists: tuple[str, ...], samples: tuple[int, ...], names: tuple[str, ...]) -> Iterator[str]:
    for flag, values in (("--extra-valid-data-samples", samples), ("--extra-valid-data-names", names)):
        if values and len(values) != len(lists):
            yield (
                f"{flag} is given {len(values)} times and {_DATALIST} {len(lists)} times; give both once for each "
                f"validation set, or leave {flag} out"
            )
    for number in samples:
        if number < 1:
            yield f"--extra-valid-data-samples {number}: give 1 or more, or leave the validation set out"
    called = names or tuple(Path(path).name for path in lists)
    for name in dict.fromkeys(called):
        if name in RESERVED_NAMES or not name:
            yield f"--extra-valid-data-names {name!r} is taken; give the validation set another name"
        elif called.count(name) > 1:
            yield f"two validation sets are called {name}; tell them apart with --extra-valid-data-names"


def _read_text(path: str, flag: str) -> str:
    try:
        # Not only of a file: the shell's <(...) is a pipe.
        with open(path, "rb") as file:
            content = file.read(MAX_TEXT_BYTES + 1)
        if len(content) > MAX_TEXT_BYTES:
            raise ConfigurationError(
                f"{flag} {path}: it has more than {MAX_TEXT_BYTES} bytes; give a list of data sets"
            )
        return content.decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{flag} {path}: the file cannot be read ({error})") from error
