"""A checkpoint of torchtitan's Llama, of whatever layout, as global tensors under native names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megatron.core.sharding import Box
from megatron.core.tokenizers.tokenizer import NullTokenizer
from megatron.interop.checkpoint_source import TensorInfo
from megatron.interop.huggingface.link_table import LinkTable
from megatron.interop.huggingface.tensor_link import TensorLink
from megatron.interop.misfits import refuse_misfits
from megatron.interop.torch_dist.stored_boxes import BoxReader, StoredBox, chunk_boxes
from megatron.interop.torch_dist.stored_metadata import read_metadata
from megatron.interop.torchtitan.stored_names import find_links, find_weights, read_model
from megatron.interop.torchtitan.told_settings import require_told
from megatron.interop.untrained_model import untrained_common

_ROTATED = (".attention.wq.weight", ".attention.wk.weight")
"""Ends of the names of weights whose rows make the channels that rotary positions turn."""


class TorchtitanSource:
    """Offer the weights of a folder; see `CheckpointSource`. State of the optimizer is left aside.

    ``values`` holds what the files do not say of the model, by field of a `GPTConfig` (see `require_told`).

    Raises:
        CheckpointError: the files hold something else than a Llama, or ``values`` lack what is needed.
        DamagedCheckpointError: one is missing or damaged.
    """

    @refuse_misfits
    def __init__(self, folder: Path, values: Mapping[str, Any] | None) -> None:
        self.folder = folder
        self.metadata = read_metadata(folder)
        self._keys = find_weights(self.metadata)
        entries = {name: self.metadata.tensors[key] for name, key in self._keys.items()}
        self.config = read_model(entries, require_told(values, folder), folder)
        links = find_links(self.config, entries, folder)
        self._table = LinkTable(links, {name: entry.dtype for name, entry in entries.items()}, folder)
        self.tensors: Mapping[str, TensorInfo] = self._table.tensors
        self._reader = BoxReader()
        self._boxes: dict[str, list[StoredBox]] = {
            name: [box for _, box in chunk_boxes(entry, is_stacked=False)] for name, entry in entries.items()
        }
        tokenizer = {"tokenizer_type": NullTokenizer.name, "vocab_size": self.config.vocab_size - 1}
        self.common: Mapping[str, Any] = untrained_common(self.config, tokenizer)

    @refuse_misfits
    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Return a box of a tensor, or all of it, contiguous on the CPU.

        Raises:
            KeyError: there is no tensor of this name.
            CheckpointError: the file that holds it is missing or damaged.
        """
        return self._table.read(name, box, self._fill)

    def check_storages(self, index: int = 0, count: int = 1) -> None:
        """Compare the checksums of every ``count``-th entry of a weight, from number ``index`` on.

        Raises:
            DamagedCheckpointError: an entry does not match the checksum beside it; the tensor is named.
        """
        self.metadata.check_storages(frozenset(self._keys.values()), index, count)

    def close(self) -> None:
        """Close the files; the source cannot be read afterwards."""
        self._reader.close()

    def _fill(self, link: TensorLink, part: Box, target: torch.Tensor) -> None:
        """Copy a part of a link's box, in our order of a head's rows."""
        if link.foreign.endswith(_ROTATED) and not self.config.rotary_interleaved:
            target.copy_(self._half_split(link, part, target.dtype))
        else:
            target.copy_(self._read_part(link, part, target.dtype))

    def _half_split(self, link: TensorLink, part: Box, dtype: torch.dtype) -> torch.Tensor:
        """Return a part of a link's box with each head's rows in our order.

        Theirs turn the channels 2i and 2i + 1 of a head together, ours i and d/2 + i.
        """
        whole = link.native_box
        columns = Box((whole.offset[0], part.offset[1]), (whole.shape[0], part.shape[1]))
        values = self._read_part(link, columns, dtype)
        pairs = values.view(-1, self.config.kv_channels // 2, 2, values.shape[1])
        return pairs.transpose(1, 2).reshape(values.shape)[part.relative_to(columns.offset).slices]

    def _read_part(self, link: TensorLink, part: Box, dtype: torch.dtype) -> torch.Tensor:
        return self._reader.read(self._keys[link.foreign], link.foreign_part(part), dtype, self._boxes[link.foreign])
