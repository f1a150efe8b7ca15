"""View a checkpoint source with changes: other shared state, fewer tensors, another dtype, reads reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.state_dict import MODEL_PREFIX, OPTIMIZER_PREFIX
from megatron.core.sharding import Box
from megatron.interop.checkpoint_source import CheckpointSource, TensorInfo


class SourceView:
    """Pass a source on with another ``common``; a `CheckpointSource` itself.

    Without ``keeps_optimizer`` the optimizer's tensors are left out. Weights are converted to ``weights_dtype`` where
    it is given. ``on_read`` is called with the bytes of every tensor, or part of one, that was read.
    """

    def __init__(
        self,
        source: CheckpointSource,
        common: Mapping[str, Any],
        *,
        keeps_optimizer: bool = True,
        weights_dtype: torch.dtype | None = None,
        on_read: Callable[[int], None] | None = None,
    ) -> None:
        self.common = common
        self._source = source
        self._on_read = on_read
        self.tensors: Mapping[str, TensorInfo] = {
            name: _converted(info, weights_dtype) if name.startswith(MODEL_PREFIX) else info
            for name, info in source.tensors.items()
            if keeps_optimizer or not name.startswith(OPTIMIZER_PREFIX)
        }

    @property
    def folder(self) -> Path:
        """Return what the source opened."""
        return self._source.folder

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it.

        Raises:
            KeyError: there is no tensor of this name in the view.
            CheckpointError: the file that holds it is missing or damaged.
        """
        dtype = self.tensors[name].dtype
        values = self._source.read(name, box).to(dtype)
        if self._on_read is not None:
            self._on_read(values.nbytes)
        return values

    def close(self) -> None:
        """Close the source."""
        self._source.close()


def _converted(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    return info if dtype is None else TensorInfo(info.global_shape, dtype)
