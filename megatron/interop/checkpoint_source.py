"""What every checkpoint format offers to a reader: global tensors under the native format's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from megatron.core.sharding import Box


@dataclass(frozen=True)
class TensorInfo:
    """Hold a tensor's unpadded shape in the whole model, and the dtype that it is stored in."""

    global_shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_elements(self) -> int:
        """Return how many elements the whole tensor has."""
        return self.whole.num_elements

    @property
    def num_bytes(self) -> int:
        """Return the bytes of the whole tensor."""
        return self.num_elements * self.dtype.itemsize

    @property
    def whole(self) -> Box:
        """Return the box of the whole tensor."""
        return Box((0,) * len(self.global_shape), self.global_shape)


class CheckpointSource(Protocol):
    """A checkpoint on disk, of any format, as the native format sees it.

    Nothing is read before it is asked for: a source holds no tensor of the checkpoint longer than the call that returns
    it, so that a checkpoint of any size can be passed on in the memory of its largest stored tensor.
    """

    @property
    def folder(self) -> Path:
        """Return what was opened: the folder of one iteration, or of a Hugging Face model."""

    @property
    def common(self) -> Mapping[str, Any]:
        """Return the ``common`` of a native index: progress, config, layout, optimizer, scheduler and tokenizer.

        ``config`` is complete: what `RunConfig.to_dict` would return for the run. ``optimizer`` and ``scheduler`` are
        None where the checkpoint has no optimizer state.
        """

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """Return every tensor by its native name.

        The names are ``model.<parameter>`` and ``optimizer.{exp_avg,exp_avg_sq,main_param}.<parameter>``. Layers are
        numbered over the whole model, the vocabulary has no padding, the rows of fused weights lie in the native order,
        and a tied weight appears once. Streams of random numbers are left out: they belong to a layout.
        """

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it, contiguous on the CPU; only the bytes that it needs are read.

        Raises:
            KeyError: there is no tensor of this name.
            CheckpointError: the file that holds it is missing or damaged.
        """

    def close(self) -> None:
        """Close the files; the source cannot be read afterwards."""
