"""Read token files of other frameworks as one stream: nanoGPT's and llm.c's .bin, OLMo's .npy, litdata's shards."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megatron.core.datasets import idx_path
from megatron.core.errors import DataError

_PIECE_TOKENS: Final = 1 << 20
_HEADER_BYTES: Final = 256 * 4
# Magic number of llm.c's header, which has 256 int32 values, and the dtype of the tokens that follow.
_HEADERS: Final = {20240520: "<u2", 20240801: "<u4"}
_NUMPY_MAGIC: Final = b"\x93NUMPY"
_LITDATA_INDEX: Final = "index.json"
# Integer dtypes of litdata's codes N in "no_header_numpy:N" and "no_header_tensor:N".
_LITDATA_TYPES: Final = {
    "no_header_numpy": {"1": "<i2", "2": "<i4", "3": "<i8", "5": "<u2", "6": "<u4", "7": "<u8"},
    "no_header_tensor": {"13": "<i2", "14": "<i2", "15": "<i4", "16": "<i4", "17": "<i8", "18": "<i8"},
}


@dataclass(frozen=True)
class TokenShard:
    """Contiguous tokens in a file: their byte offset, number and dtype."""

    path: Path
    begin: int
    num_tokens: int
    dtype: np.dtype[Any]

    def pieces(self) -> Iterator[NDArray[Any]]:
        """Yield the tokens in pieces.

        Raises:
            DataError: the file ends before its tokens do.
        """
        with open(self.path, "rb", buffering=0) as file:
            file.seek(self.begin)
            left = self.num_tokens
            while left:
                piece = np.fromfile(file, self.dtype, min(left, _PIECE_TOKENS))
                if not len(piece):
                    raise DataError(f"{self.path} is truncated: {left} tokens are missing; copy it again")
                left -= len(piece)
                yield piece


def find_token_shards(path: Path, dtype: str) -> list[TokenShard]:
    """List the token shards of a file or folder, sorted by name; empty for Megatron's ``.bin``/``.idx`` pairs.

    ``dtype`` is the token dtype of files that do not specify it.

    Raises:
        DataError: a file is of another format or truncated.
    """
    index = path / _LITDATA_INDEX
    if index.is_file():
        return _litdata_shards(index)
    if not path.is_file() and not path.is_dir():
        raise DataError(f"{path} is neither a file nor a folder; change --input")
    files = [path] if path.is_file() else sorted(found for found in path.iterdir() if found.suffix in (".bin", ".npy"))
    others = [file for file in files if not idx_path(file.with_suffix("")).exists()]
    if 0 < len(others) < len(files):
        print(
            f"Skipping {len(files) - len(others)} .bin/.idx pairs in {path}: --eod-id applies only to token files "
            "without .idx"
        )
    return [_file_shard(file, np.dtype(dtype)) for file in others]


def _file_shard(path: Path, dtype: np.dtype[Any]) -> TokenShard:
    size = os.stat(path).st_size
    with open(path, "rb") as file:
        beginning = file.read(_HEADER_BYTES)
    if beginning.startswith(_NUMPY_MAGIC):
        try:
            tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        except ValueError as error:
            raise DataError(f"{path} cannot be read as a NumPy file: {error}; copy it again") from error
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{path} contains a {tokens.dtype.name} array of shape {list(tokens.shape)}; a one-dimensional array "
                "of token ids is expected"
            )
        return TokenShard(path, tokens.offset, len(tokens), tokens.dtype)
    if len(beginning) == _HEADER_BYTES:
        magic, _, num_tokens = np.frombuffer(beginning, "<i4", 3).tolist()
        if magic in _HEADERS:
            found = np.dtype(_HEADERS[magic])
            _check_size(path, size - _HEADER_BYTES, num_tokens * found.itemsize)
            return TokenShard(path, _HEADER_BYTES, num_tokens, found)
    if size % dtype.itemsize:
        raise DataError(
            f"{path} has {size} bytes, which is not a multiple of the size of a {dtype.name} token; change "
            "--token-dtype"
        )
    return TokenShard(path, 0, size // dtype.itemsize, dtype)


def _litdata_shards(index: Path) -> list[TokenShard]:
    try:
        content = json.loads(index.read_text(encoding="utf-8"))
        config, names = content["config"], [chunk["filename"] for chunk in content["chunks"]]
        kinds: Sequence[str] = config["data_format"]
        compression = config["compression"]
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{index} is not a litdata index: {error!r}") from error
    layout, _, number = kinds[0].partition(":")
    known = _LITDATA_TYPES.get(layout, {}).get(number)
    if len(kinds) != 1 or known is None or compression is not None:
        raise DataError(
            f"{index} has the data format {', '.join(kinds)} with compression {compression}; only uncompressed shards "
            "for litdata's TokensLoader are supported"
        )
    dtype = np.dtype(known)
    return [_litdata_shard(index.parent / name, dtype) for name in names]


def _litdata_shard(path: Path, dtype: np.dtype[Any]) -> TokenShard:
    """Read the start of the first item and the end of the last. The items are contiguous."""
    try:
        with open(path, "rb") as file:
            (num_items,) = np.fromfile(file, "<u4", 1).tolist()
            offsets = np.fromfile(file, "<u4", num_items + 1)
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as a litdata shard: {error}") from error
    if len(offsets) != num_items + 1:
        raise DataError(f"{path} is truncated; copy it again")
    begin, end = int(offsets[0]), int(offsets[-1])
    _check_size(path, os.stat(path).st_size, end)
    return TokenShard(path, begin, (end - begin) // dtype.itemsize, dtype)


def _check_size(path: Path, found: int, expected: int) -> None:
    if found < expected:
        raise DataError(f"{path} contains {found} bytes, but its header says {expected}; copy it again")
