"""A checkpoint whose weights are the averages (``--ema-decay``) that it holds beside them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.dist_checkpointing.state_dict import AVERAGE_PREFIX, MODEL_PREFIX, OPTIMIZER_PREFIX
from megatron.core.errors import ConfigurationError
from megatron.core.sharding import Box
from megatron.interop.checkpoint_source import CheckpointSource, TensorInfo


class AveragedSource:
    """View a source with averages in place of the weights that have some, rounded to the weights' type.

    The optimizer's state, which is of the weights, is left out; a `CheckpointSource` itself.

    Raises:
        ConfigurationError: the source holds no averages.
    """

    def __init__(self, source: CheckpointSource) -> None:
        if not any(name.startswith(AVERAGE_PREFIX) for name in source.tensors):
            raise ConfigurationError(
                f"{source.folder} holds no averages of weights; leave --ema out, or give a native checkpoint of a run "
                "with --ema-decay"
            )
        self._source = source
        self.common: Mapping[str, Any] = {**source.common, "optimizer": None, "scheduler": None}
        self.tensors: Mapping[str, TensorInfo] = {
            name: info for name, info in source.tensors.items() if not name.startswith(OPTIMIZER_PREFIX)
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
        average = AVERAGE_PREFIX + name.removeprefix(MODEL_PREFIX)
        is_averaged = name.startswith(MODEL_PREFIX) and average in self._source.tensors
        return self._source.read(average if is_averaged else name, box).to(dtype)

    def close(self) -> None:
        """Close the source."""
        self._source.close()
