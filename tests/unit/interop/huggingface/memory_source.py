"""A checkpoint source whose tensors lie in memory, as if another format had been read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint.checkpoint_source import CheckpointSource, TensorInfo
from megatron.core.sharding import Box


class MemorySource:
    """Hold tensors by their native names; a `CheckpointSource`."""

    def __init__(self, values: Mapping[str, torch.Tensor], common: Mapping[str, Any], folder: Path) -> None:
        self.folder = folder
        self.values = dict(values)
        # What a file would keep of it.
        self.common: Mapping[str, Any] = json.loads(json.dumps(common))
        self.tensors = {name: TensorInfo(tuple(value.shape), value.dtype) for name, value in self.values.items()}

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        value = self.values[name]
        return (value if box is None else value[box.slices]).clone(memory_format=torch.contiguous_format)

    def close(self) -> None:
        self.values = {}


def copy_of(source: CheckpointSource) -> MemorySource:
    """Read everything and let the original go."""
    values = {name: source.read(name) for name in source.tensors}
    source.close()
    return MemorySource(values, source.common, source.folder)
