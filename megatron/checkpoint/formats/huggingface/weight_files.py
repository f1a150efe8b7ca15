"""Safetensors files of a model folder: read by box, with dequantization of block-quantized weights, and written.

MXFP4 has 4-bit values with an exponent per 32 values. A byte holds two values of one sign bit, two exponent bits and
one mantissa bit each, the lower half first (OCP Microscaling Formats 1.0,
https://www.opencompute.org/documents/ocp-microscaling-formats-mx-v1-0-spec-final-pdf).
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron.checkpoint.formats.huggingface.model_record import FileRecord
from megatron.checkpoint.formats.huggingface.settings import INDEX_FILE, SINGLE_FILE, BlockFloat4, BlockFloat8
from megatron.core.errors import CheckpointError
from megatron.core.precision import dtype_from_name
from megatron.core.safe_io import parse_json
from megatron.core.sharding import Box

OUTPUT_LAYER = "lm_head.weight"

_LENGTH_BYTES = 8
_LFS_POINTER = b"version https://git-lfs"
_OTHER_FILES = (
    ("model*.safetensors", "", f"copy {INDEX_FILE} too, or rename a file that contains all weights to {SINGLE_FILE}"),
    ("*.bin", ": pickle files can run code, so they are not loaded", ""),
)
"""Other files that a folder may hold: a pattern, a remark, and advice if it is not to save the model again."""
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
    """Tensor in a file."""

    file: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    start: int


class WeightFiles:
    """Box-wise reader of the tensors of a model folder.

    The safetensors library memory-maps files, so that reading a box loads only its pages. A mapping is closed after 256
    MiB were read through it, since accessed pages count as this process's memory.

    Raises:
        CheckpointError: there are no safetensors files (pickled files are never read), or a file is missing, damaged or
            has different tensors than the index.
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
        """Close the memory mappings; the next read creates new ones."""
        for opened in self._open.values():
            opened.__exit__(None, None, None)
        self._open.clear()
        self._mapped_bytes = 0

    def _file(self, name: str) -> Any:
        if name not in self._open:
            self._open[name] = safe_open(self.folder / name, framework="pt", device="cpu")
        return self._open[name]

    def _read_header(self, file: str) -> None:
        """Validate the file with the library, then read the order and offsets of its tensors from the header."""
        path = self.folder / file
        _refuse_pointer(path)
        try:
            self._file(file)
            with open(path, "rb") as stream:
                length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
                header = parse_json(stream.read(length))
        except (OSError, SafetensorError, ValueError) as error:
            reason = _describe_truncation(path) or f"cannot be read as a safetensors file: {error}"
            raise CheckpointError(f"{path} {reason}; copy or download it again") from error
        metadata = header.pop("__metadata__", None)
        self.metadata[file] = metadata
        for name, entry in header.items():
            if entry["dtype"] not in DTYPES:
                raise CheckpointError(f"{path}: {name} has the dtype {entry['dtype']}, which is not supported")
            if name in self.entries:
                raise CheckpointError(f"{self.folder}: {name} is in both {self.entries[name].file} and {file}")
            start = int(entry["data_offsets"][0])
            self.entries[name] = WeightEntry(file, tuple(entry["shape"]), DTYPES[entry["dtype"]], start)

    def _compare_index(self, weight_map: Mapping[str, str]) -> None:
        for name, file in weight_map.items():
            if name not in self.entries or self.entries[name].file != file:
                raise CheckpointError(
                    f"{self.folder / file} does not contain {name}, although {INDEX_FILE} lists it there"
                )
        extra = [name for name in self.entries if name not in weight_map]
        if extra:
            raise CheckpointError(f"{self.folder}: {INDEX_FILE} does not list {', '.join(extra[:5])}")


def _describe_truncation(path: Path) -> str | None:
    """Return how many bytes a truncated safetensors file has and should have; None for other damage."""
    try:
        with open(path, "rb") as stream:
            size = os.fstat(stream.fileno()).st_size
            needed = _LENGTH_BYTES + int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            if size >= needed:
                header = parse_json(stream.read(needed - _LENGTH_BYTES))
                needed += max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, AttributeError, KeyError, TypeError, IndexError):
        return None
    return f"is truncated: it has {size} bytes, but needs at least {needed}" if 0 < size < needed else None


def _refuse_pointer(path: Path) -> None:
    """Reject a Git LFS pointer instead of a file, and a missing file."""
    try:
        with open(path, "rb") as stream:
            beginning = stream.read(len(_LFS_POINTER))
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; copy or download all files of the model") from error
    except OSError:
        return  # opening the file reports a better error
    if beginning == _LFS_POINTER:
        raise CheckpointError(f"{path} is a Git LFS pointer, not the weights; run git lfs pull")


def _find_files(folder: Path) -> tuple[list[str], str | None]:
    """Return the names of the safetensors files, and the text of the index if there is one."""
    if not folder.is_dir():
        raise CheckpointError(f"{folder} is not a folder; pass the folder of a Hugging Face model")
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
    """Return the file of each tensor; only files in the index's own folder are allowed."""
    try:
        weight_map = parse_json(text)["weight_map"]
        pairs = {str(name): str(file) for name, file in weight_map.items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an index of safetensors files: {error!r}") from error
    for file in pairs.values():
        if Path(file).name != file or not file.endswith(".safetensors"):
            raise CheckpointError(f"{path} lists the file {file!r}; a safetensors file in the same folder is expected")
    return pairs


_FACTORS = "_scale_inv"
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


class BlockFloat8Weights:
    """Dequantized FP8 weights: each weight is multiplied by the scale of its block; other tensors are unchanged.

    Raises:
        CheckpointError: an FP8 weight has no scales, or their shape does not match its blocks.
    """

    def __init__(self, files: WeightFiles, quantization: BlockFloat8) -> None:
        self.folder = files.folder
        self._files, self._block = files, quantization.block
        self._dtype = dtype_from_name(quantization.dtype)
        self._quantized = {name for name, entry in files.entries.items() if entry.dtype in _FLOAT8}
        for name in self._quantized:
            self._check_factors(name)
        factors = {name + _FACTORS for name in self._quantized}
        self.entries: dict[str, WeightEntry] = {
            name: dataclasses.replace(entry, dtype=self._dtype) if name in self._quantized else entry
            for name, entry in files.entries.items()
            if name not in factors
        }

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        values = self._files.read(name, box)
        if name not in self._quantized:
            return values
        places = [
            torch.arange(start, start + length) // size
            for start, length, size in zip(box.offset, box.shape, self._block, strict=True)
        ]
        first = tuple(int(place[0]) if len(place) else 0 for place in places)
        counts = tuple(int(place[-1]) - start + 1 if len(place) else 0 for place, start in zip(places, first))
        factors = self._files.read(name + _FACTORS, Box(first, counts)).float()
        rows, columns = (place - start for place, start in zip(places, first))
        return (values.float() * factors[rows][:, columns]).to(self._dtype)

    def _check_factors(self, name: str) -> None:
        shape, factors = self._files.entries[name].shape, self._files.entries.get(name + _FACTORS)
        if len(shape) != 2:
            raise CheckpointError(
                f"{self.folder}: {name} is stored in FP8 with shape {list(shape)}; two dimensions are expected"
            )
        wanted = tuple(-(-length // size) for length, size in zip(shape, self._block))
        if factors is None:
            raise CheckpointError(
                f"{self.folder}: {name} is stored in FP8, but its scales {name + _FACTORS} are missing"
            )
        if factors.shape != wanted:
            raise CheckpointError(
                f"{self.folder}: {name + _FACTORS} has shape {list(factors.shape)}, but {self._block[0]} x "
                f"{self._block[1]} blocks of a weight with shape {list(shape)} need {list(wanted)}"
            )


_BLOCKS, _SCALES = "_blocks", "_scales"
_IN_BLOCK, _BYTES = 32, 16
_EXPONENT_OF_ONE = 127
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


class BlockFloat4Weights:
    """Dequantized MXFP4 weights: each weight is multiplied by its block's power of two; other tensors are unchanged.

    The files have ``NAME_blocks``, bytes ``[experts, out, in / 32, 16]``, and ``NAME_scales``, exponents plus 127
    ``[experts, out, in / 32]``. The result is ``NAME``, ``[experts, in, out]``.

    Raises:
        CheckpointError: blocks have an unsupported dtype or shape, or no matching scales.
    """

    def __init__(self, files: WeightFiles, quantization: BlockFloat4) -> None:
        self.folder = files.folder
        self._files, self._dtype = files, dtype_from_name(quantization.dtype)
        self._quantized = {name.removesuffix(_BLOCKS) for name in files.entries if name.endswith(_BLOCKS)}
        stored = {name + ending for name in self._quantized for ending in (_BLOCKS, _SCALES)}
        self.entries: dict[str, WeightEntry] = {
            name: entry for name, entry in files.entries.items() if name not in stored
        }
        for name in self._quantized:
            self.entries[name] = self._entry(name)

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a box of a tensor.

        Raises:
            CheckpointError: the file cannot be read.
        """
        if name not in self._quantized:
            return self._files.read(name, box)
        (expert, first, row), (experts, columns, rows) = box.offset, box.shape
        start, end = first // _IN_BLOCK, -(-(first + columns) // _IN_BLOCK)
        of_blocks = Box((expert, row, start), (experts, rows, end - start))
        packed = self._files.read(name + _BLOCKS, Box((*of_blocks.offset, 0), (*of_blocks.shape, _BYTES)))
        exponents = self._files.read(name + _SCALES, of_blocks).int() - _EXPONENT_OF_ONE
        magnitudes = torch.tensor(_MAGNITUDES)
        values = torch.cat((magnitudes, -magnitudes))
        pairs = torch.stack((values[(packed & 15).int()], values[(packed >> 4).int()]), dim=-1)
        whole = torch.ldexp(pairs.flatten(3), exponents[..., None]).flatten(2)
        inner = first - start * _IN_BLOCK
        return whole[:, :, inner : inner + columns].mT.to(self._dtype)

    def _entry(self, name: str) -> WeightEntry:
        blocks, scales = (self._files.entries.get(name + ending) for ending in (_BLOCKS, _SCALES))
        assert blocks is not None, "names are of blocks"
        if scales is None:
            raise CheckpointError(
                f"{self.folder}: {name + _BLOCKS} is stored in MXFP4, but its scales {name + _SCALES} are missing"
            )
        for entry, ending in ((blocks, _BLOCKS), (scales, _SCALES)):
            if entry.dtype != torch.uint8:
                raise CheckpointError(
                    f"{self.folder}: {name + ending} has dtype {entry.dtype}; torch.uint8 is expected"
                )
        if len(blocks.shape) != 4 or blocks.shape[3] != _BYTES:
            raise CheckpointError(
                f"{self.folder}: {name + _BLOCKS} has shape {list(blocks.shape)}; four dimensions are expected, the "
                f"last of size {_BYTES}"
            )
        if scales.shape != blocks.shape[:3]:
            raise CheckpointError(
                f"{self.folder}: {name + _SCALES} has shape {list(scales.shape)}, but its blocks need "
                f"{list(blocks.shape[:3])}"
            )
        experts, rows, num_blocks, _ = blocks.shape
        return WeightEntry(blocks.file, (experts, num_blocks * _IN_BLOCK, rows), self._dtype, blocks.start)


_ALIGNMENT = 8
_METADATA = {"format": "pt"}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class WeightInfo:
    """Shape and dtype of a tensor to write."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def plan_files(weights: Mapping[str, WeightInfo], max_file_bytes: int) -> dict[str, FileRecord]:
    """Distribute tensors in order over files of at most ``max_file_bytes``; a larger tensor has its own file.

    A single file is ``model.safetensors``; several files are numbered. Within a file tensors are sorted by decreasing
    dtype size, then by name.
    """
    groups: list[list[str]] = [[]]
    size = 0
    for name, weight in weights.items():
        if groups[-1] and size + weight.num_bytes > max_file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(name)
        size += weight.num_bytes
    if len(groups) == 1:
        names = [SINGLE_FILE]
    else:
        names = [f"model-{number:05d}-of-{len(groups):05d}.safetensors" for number in range(1, len(groups) + 1)]
    return {
        file: FileRecord(tuple(sorted(group, key=lambda name: (-weights[name].dtype.itemsize, name))), _METADATA)
        for file, group in zip(names, groups, strict=True)
    }


def write_weights(
    path: Path,
    names: Sequence[str],
    metadata: Mapping[str, str] | None,
    weights: Mapping[str, WeightInfo],
    values_of: Callable[[str], torch.Tensor],
) -> None:
    """Write one file and flush it to disk; ``values_of`` returns a tensor's contiguous values on the CPU."""
    with open(path, "wb") as file:
        file.write(_header(names, metadata, weights))
        for name in names:
            # Not assigned to a variable, so that this tensor is freed before the next is read.
            file.write(_bytes_of(values_of(name), weights[name]))
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(values: torch.Tensor, weight: WeightInfo) -> memoryview:
    assert (tuple(values.shape), values.dtype) == (weight.shape, weight.dtype), "the values are not what was planned"
    return values.reshape(-1).view(torch.uint8).numpy().data


def _header(names: Sequence[str], metadata: Mapping[str, str] | None, weights: Mapping[str, WeightInfo]) -> bytes:
    """Return the length field and the header in the layout of the safetensors library, padded with spaces."""
    content: dict[str, object] = {} if metadata is None else {"__metadata__": dict(metadata)}
    start = 0
    for name in names:
        end = start + weights[name].num_bytes
        dtype = _DTYPE_NAMES[weights[name].dtype]
        content[name] = {"dtype": dtype, "shape": list(weights[name].shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(content, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text
