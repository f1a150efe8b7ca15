"""The safetensors files of a model folder, with or without an index: what is in them, and any box of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.core.errors import CheckpointError
from megatron.core.safe_io import parse_json
from megatron.core.sharding import Box

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
OUTPUT_LAYER = "lm_head.weight"

_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_OTHER_FILES = (
    ("model*.safetensors", "", f"copy {INDEX_FILE} too, or rename a file that holds all weights to {SINGLE_FILE}"),
    ("*.bin", ": pickles can run code and are not read", ""),
)
"""What else a folder may hold: a pattern, a remark and what to do where that is not to save the model anew."""
_MAPPED_BYTES = 256 * 1024 * 1024

DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class WeightEntry:
    """Describe one tensor of a file."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


class WeightFiles:
    """Read boxes of the tensors of a model folder.

    The safetensors library maps files into memory, so that a box costs the pages that it touches; a mapping is given up
    after 256 MiB were read through it, since touched pages count as this process's memory.

    Raises:
        CheckpointError: there are no safetensors files (pickled ones are never read), one is missing, damaged or holds
            another set of tensors than the index says.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata: dict[str, dict[str, str] | None] = {}
        self.entries: dict[str, WeightEntry] = {}
        self.bytes_read = 0
        self._open: dict[str, Any] = {}
        self._mapped_bytes = 0
        names, self.index_text = _find_files(folder)
        for file in names:
            self._read_header(file)
        if self.index_text is not None:
            self._compare_index(_weight_map(self.index_text, folder / INDEX_FILE))

    def names_in(self, file: str) -> tuple[str, ...]:
        """Return the tensors of a file in the order of their bytes."""
        own = [name for name, entry in self.entries.items() if entry.file == file]
        return tuple(sorted(own, key=lambda name: self.entries[name].start))

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a copy of a box of a tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        entry = self.entries[name]
        try:
            part = self._file(entry.file).get_slice(name)
            values: torch.Tensor = part[box.slices] if box.shape else part[...]
            values = values.clone(memory_format=torch.contiguous_format)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.folder / entry.file}: cannot read {name}: {error}") from error
        num_bytes = values.numel() * values.element_size()
        self.bytes_read += num_bytes
        self._mapped_bytes += num_bytes
        if self._mapped_bytes > _MAPPED_BYTES:
            self.close()
        return values

    def close(self) -> None:
        """Give the mappings up; the next read makes new ones."""
        for opened in self._open.values():
            opened.__exit__(None, None, None)
        self._open.clear()
        self._mapped_bytes = 0

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt", device="cpu")
        return self._open[name]

    def _read_header(self, file: str) -> None:
        """Let the library judge the file, then take the order and the places of the tensors from its header."""
        path = self.folder / file
        _refuse_pointer(path)
        try:
            self._file(file)
            with open(path, "rb") as stream:
                length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
                header = parse_json(stream.read(length))
        except (OSError, SafetensorError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read as a safetensors file: {error}") from error
        metadata = header.pop("__metadata__", None)
        self.metadata[file] = metadata
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{path}: {name} has the dtype {entry['dtype']}, which is not supported")
            if name in self.entries:
                raise CheckpointError(f"{name} is in {self.entries[name].file} and in {file} of {self.folder}")
            start = int(entry["data_offsets"][0])
            self.entries[name] = WeightEntry(file, tuple(entry["shape"]), DTYPES[entry["dtype"]], start)

    def _compare_index(self, weight_map: Mapping[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self.entries or self.entries[name].file != file:
                raise CheckpointError(f"{self.folder / file} lacks {name}, which {INDEX_FILE} says it holds")
        extra = [name for name in self.entries if name not in weight_map]
        if extra:
            raise CheckpointError(f"{self.folder}: {INDEX_FILE} does not list {', '.join(extra[:5])}")


def _refuse_pointer(path: Path) -> None:
    """Refuse what git leaves in the place of a large file that it has not fetched, and a file that is not there."""
    try:
        with open(path, "rb") as stream:
            beginning = stream.read(len(_LFS_POINTER))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; copy or download all files of the model") from error
    except OSError:
        return  # what opens it next says more
    if beginning == _LFS_POINTER:
        raise CheckpointError(f"{path} holds no weights but a pointer of Git LFS; fetch them: git lfs pull")


def _find_files(folder: Path) -> tuple[list[str], str | None]:
    """Return the names of the safetensors files, and the text of the index where there is one."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; name the folder of a Hugging Face model")
    if (folder / SINGLE_FILE).is_file():
        return [SINGLE_FILE], None
    path = folder / INDEX_FILE
    if path.is_file():
        try:
            text = path.read_bytes().decode("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"cannot read {path}: {error}") from error
        return sorted(set(_weight_map(text, path).values())), text
    found, advice = "nothing else", "save the model in safetensors files"
    for pattern, why, what in _OTHER_FILES:
        names = sorted(path.name for path in folder.glob(pattern))
        if names:
            found, advice = f"only {', '.join(names[:3])}{why}", what or advice
            break
    raise CheckpointError(f"{folder} has no {SINGLE_FILE} and no {INDEX_FILE}, {found}; {advice}")


def _weight_map(text: str, path: Path) -> dict[str, str]:
    """Return which file holds each tensor; a file beside the index is meant, never one elsewhere."""
    try:
        weight_map = parse_json(text)["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error!r}") from error
    for file in pairs.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} names {file!r}; a safetensors file in the same folder is expected")
    return pairs
