"""A checkpoint as if its low-rank adapters had been part of its weights from the beginning."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.state_dict import OPTIMIZER_PREFIX
from megatron.core.errors import ConfigurationError
from megatron.core.sharding import Box
from megatron.core.transformer.lora_targets import ADAPTERS
from megatron.interop.adapters.stored_adapter import NO_ADAPTERS, StoredAdapter, model_config, stored_adapters
from megatron.interop.checkpoint_source import CheckpointSource, TensorInfo


class MergedSource:
    """Offer the weights ``W + (alpha / rank) B A`` of a checkpoint with adapters; a `CheckpointSource`.

    The sum is taken in at least float32 and rounded once to the type of the weight. Optimizer state, which is of the
    adapters, is left out.

    Raises:
        ConfigurationError: the checkpoint has no adapters.
    """

    def __init__(self, source: CheckpointSource) -> None:
        self.base = source
        config = model_config(source)
        self._scale = config.lora_alpha / max(config.lora_rank, 1)
        self._adapters: dict[str, list[StoredAdapter]] = {}
        for adapter in stored_adapters(source, config):
            self._adapters.setdefault(adapter.weight, []).append(adapter)
        if not self._adapters:
            raise ConfigurationError(f"--merge-lora: {source.folder} holds no low-rank adapters; leave it out")
        values = source.common["config"]
        self.common: Mapping[str, Any] = {
            **source.common,
            "config": {**values, "model": {**values["model"], **NO_ADAPTERS}},
            "optimizer": None,
            "scheduler": None,
        }
        self.tensors: Mapping[str, TensorInfo] = {
            name: info
            for name, info in source.tensors.items()
            if ADAPTERS not in name and not name.startswith(OPTIMIZER_PREFIX)
        }

    @property
    def folder(self) -> Path:
        """Return what the checkpoint's source opened."""
        return self.base.folder

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it.

        Raises:
            KeyError: there is no tensor of this name.
            CheckpointError: a file that holds a part of it is missing or damaged.
        """
        info = self.tensors[name]
        values = self.base.read(name, box)
        if name not in self._adapters:
            return values
        box = info.whole if box is None else box
        merged = values.to(torch.promote_types(info.dtype, torch.float32))
        # In front of rows and columns is the number of the expert, where the weight stacks those of experts.
        (*place, first_row, first_column), (*count, num_rows, num_columns) = box.offset, box.shape
        for adapter in self._adapters[name]:
            rank = self.base.tensors[adapter.down].global_shape[-2]
            of_down = Box((*place, 0, first_column), (*count, rank, num_columns))
            down = self.base.read(adapter.down, of_down).to(merged.dtype)
            for rows in adapter.rows:
                start, end = max(rows.first, first_row), min(rows.first + rows.count, first_row + num_rows)
                if start < end:
                    of_up = Box((*place, rows.second + start - rows.first, 0), (*count, end - start, rank))
                    up = self.base.read(adapter.up, of_up).to(merged.dtype)
                    merged[..., start - first_row : end - first_row, :] += self._scale * (up @ down)
        return merged.to(info.dtype)

    def close(self) -> None:
        """Close the checkpoint's source."""
        self.base.close()
