"""Native tensors that are put together from boxes of stored ones, whatever library has named those."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import torch

from megatron.core.errors import CheckpointError
from megatron.core.sharding import Box
from megatron.interop.checkpoint_source import TensorInfo
from megatron.interop.huggingface.tensor_link import TensorLink, shapes_of

Fill = Callable[[TensorLink, Box, torch.Tensor], None]
"""Copies what a link has of a box of ours into a tensor of the box's shape."""


class LinkTable:
    """Hold the links that make up each native tensor, with its shape and dtype.

    ``dtypes`` has the dtype of each stored tensor by its name in the links; ``folder`` is named in errors.

    Raises:
        CheckpointError: stored tensors of several dtypes make up one of ours.
    """

    def __init__(self, links: Iterable[TensorLink], dtypes: Mapping[str, torch.dtype], folder: Path) -> None:
        self._links: dict[str, list[TensorLink]] = {}
        for link in links:
            self._links.setdefault(link.native, []).append(link)
        boxes = ((link.native, link.native_box) for linked in self._links.values() for link in linked)
        self.tensors: Mapping[str, TensorInfo] = {
            name: TensorInfo(shape, _common_dtype(self._links[name], dtypes, folder))
            for name, shape in shapes_of(boxes).items()
        }

    def links_of(self, name: str) -> list[TensorLink]:
        """Return the links that make up a native tensor."""
        return self._links[name]

    def read(self, name: str, box: Box | None, fill: Fill) -> torch.Tensor:
        """Return a box of a tensor, or all of it, contiguous on the CPU.

        Raises:
            KeyError: there is no tensor of this name.
        """
        info = self.tensors[name]
        wanted = info.whole if box is None else box
        result = torch.empty(wanted.shape, dtype=info.dtype)
        for link in self._links[name]:
            common = link.native_box.intersect(wanted)
            if common is not None:
                fill(link, common, result[common.relative_to(wanted.offset).slices])
        return result


def _common_dtype(links: list[TensorLink], dtypes: Mapping[str, torch.dtype], folder: Path) -> torch.dtype:
    found = {link.foreign: dtypes[link.foreign] for link in links}
    first, *others = set(found.values())
    if others:
        listed = ", ".join(f"{name} {dtype}" for name, dtype in found.items())
        raise CheckpointError(f"{folder}: these tensors make up one of ours and must share a dtype: {listed}")
    return first
