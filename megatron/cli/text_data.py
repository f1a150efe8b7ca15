"""Tokenize the text of --train-data, --valid-data and --test-data when a run uses it for the first time.

A data set is named after the content of its files, the tokenizer and the key of the text. A later run with the same
text finds the data set, and changed text is tokenized again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron.cli import preprocess_data
from megatron.cli.arguments import TOKENIZER_KEYWORDS
from megatron.config import RunConfig
from megatron.core.datasets import bin_path, idx_path
from megatron.core.errors import DataError, InputError
from megatron.core.object_store import is_url
from megatron.core.tokenizers import Tokenizer
from megatron.core.tokenizers.build_tokenizer import build_tokenizer
from megatron.data import FORMAT, record_path

_FILES = ("vocab_file", "merge_file", "tokenizer_model")
_NUM_DIGITS = 16
_BLOCK_BYTES = 1 << 20
_ONLY_PREPROCESSING = ("--on-error", "--input-format", "--overwrite", "--restart")
"""Flags in messages of preprocessing that training does not have."""


def with_tokenized_text(config: RunConfig, *, is_reporter: bool) -> RunConfig:
    """Tokenize the text of a run and return the configuration with the prefixes of the data sets as data paths.

    The data sets are written to --data-cache-path, or next to the first file. The first process that locks the name of
    a data set tokenizes the text, and the other processes wait. Only the reporter prints which data set is read.

    Raises:
        InputError: the text cannot be tokenized, or the folder cannot be written.
    """
    data = config.data
    tokenizer = build_tokenizer(**dataclasses.asdict(config.tokenizer))
    train, valid, test = (
        (_tokenize(config, tokenizer, files, is_reporter=is_reporter),) if files else ()
        for files in (data.train_data, data.valid_data, data.test_data)
    )
    cleared = dataclasses.replace(data, train_data=(), valid_data=(), test_data=(), text_key="text")
    if data.has_data_per_split:
        data = dataclasses.replace(cleared, train_data_path=train, valid_data_path=valid, test_data_path=test)
    else:
        data = dataclasses.replace(cleared, data_path=train)
    paths = ("data_path", "train_data_path", "valid_data_path", "test_data_path")
    named = (*config.logging.given_arguments, *paths, "tokenizer_type")
    return dataclasses.replace(config, data=data, logging=dataclasses.replace(config.logging, given_arguments=named))


def _tokenize(config: RunConfig, tokenizer: Tokenizer, files: Sequence[str], *, is_reporter: bool) -> str:
    """Tokenize the text of one split, unless its data set exists, and return the prefix of the data set."""
    cache = config.data.data_cache_path
    folder = Path(files[0]).parent if cache is None or is_url(cache) else Path(cache)
    try:
        output = f"{folder / Path(files[0]).stem}-{_digest_of(config, tokenizer, files)}"
        prefix = f"{output}_{config.data.text_key}_document"
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(Path(f"{output}.lock")):
            needed = (record_path(output), bin_path(prefix), idx_path(prefix))
            is_new = not all(path.is_file() for path in needed)
            if is_new:
                words = _command_line(config, tokenizer, files, output)
                preprocess_data.preprocess(preprocess_data.build_parser().parse_args(list(words)))
    except OSError as error:
        raise DataError(
            f"{' '.join(files)}: its tokens cannot be written to {folder}: {error.strerror or error}; pass a folder "
            "with --data-cache-path"
        ) from error
    except InputError as error:
        text = str(error).replace("--json-keys", "--text-key")
        if not any(flag in text for flag in _ONLY_PREPROCESSING):
            raise DataError(text) from error
        raise DataError(
            f"{text} (a flag of tools/preprocess_data.py: tokenize with it, and pass --data-path PREFIX instead of "
            "--train-data)"
        ) from error
    if is_reporter:
        print(f"{' '.join(files)} is read from {prefix}.bin, tokenized {'now' if is_new else 'before'}", flush=True)
    return prefix


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the lock of a data set. The file is removed at the end, when a process that waits finds the data set."""
    with open(path, "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _command_line(config: RunConfig, tokenizer: Tokenizer, files: Sequence[str], output: str) -> Iterator[str]:
    """Yield the flags of tools/preprocess_data.py for the text of one split."""
    yield from ("--input", *files, "--output-prefix", output)
    yield from ("--json-keys", config.data.text_key)
    if tokenizer.eod_id is not None:
        yield "--append-eod"
    for name in TOKENIZER_KEYWORDS:
        value = getattr(config.tokenizer, name)
        if value is not None and value != ():
            yield from (f"--{name.replace('_', '-')}", *map(str, value if isinstance(value, tuple) else (value,)))


def _digest_of(config: RunConfig, tokenizer: Tokenizer, files: Sequence[str]) -> str:
    """Return a digest of everything that the tokens depend on.

    Raises:
        OSError: a file cannot be read.
    """
    settings = {name: getattr(config.tokenizer, name) for name in TOKENIZER_KEYWORDS if name not in _FILES}
    parts = [str(FORMAT), config.data.text_key, json.dumps(settings)]
    for path in (*map(str, tokenizer.files), *files):
        digest = hashlib.sha256()
        with open(path, "rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
        parts.append(digest.hexdigest())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:_NUM_DIGITS]
