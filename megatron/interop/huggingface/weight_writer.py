"""Write safetensors files one tensor at a time, after planning their layout."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch

from megatron.interop.huggingface.model_record import FileRecord
from megatron.interop.huggingface.weight_files import DTYPES, SINGLE_FILE

_ALIGNMENT = 8
_METADATA = {"format": "pt"}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class WeightInfo:
    """Hold the shape and the dtype of a tensor that is to be written."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def plan_files(weights: Mapping[str, WeightInfo], max_file_bytes: int) -> dict[str, FileRecord]:
    """Spread tensors over files of at most ``max_file_bytes``, in their order; a larger tensor has a file of its own.

    One file is ``model.safetensors``; several are numbered. In a file the widest dtypes come first, then names decide.
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
    """Write one file and force it to disk; ``values_of`` returns the contiguous values of one tensor, on the CPU."""
    with open(path, "wb") as file:
        file.write(_header(names, metadata, weights))
        for name in names:
            # Not kept in a name: the next tensor is read when this one is gone.
            file.write(_bytes_of(values_of(name), weights[name]))
        file.flush()
        os.fsync(file.fileno())


def _bytes_of(values: torch.Tensor, weight: WeightInfo) -> memoryview:
    assert (tuple(values.shape), values.dtype) == (weight.shape, weight.dtype), "the values are not what was planned"
    return values.reshape(-1).view(torch.uint8).numpy().data


def _header(names: Sequence[str], metadata: Mapping[str, str] | None, weights: Mapping[str, WeightInfo]) -> bytes:
    """Return the length field and the header as the safetensors library lays it out, padded with blanks."""
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
