"""Read weights stored under another library's names as tensors of the native format."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

import torch

from megatron.checkpoint import TensorInfo
from megatron.checkpoint.formats.huggingface.family import Family, TensorLink, names_in_files, shapes_of
from megatron.checkpoint.formats.huggingface.settings import CONFIG_FILE
from megatron.checkpoint.formats.huggingface.weight_files import OUTPUT_LAYER, WeightEntry
from megatron.core.dist_checkpointing import MAX_SHARD_BYTES
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box, split_box

Fill = Callable[[TensorLink, Box, torch.Tensor], None]
"""Copies the values of a link for a box of our tensor into a tensor of the box's shape."""


class LinkTable:
    """Links that make up each native tensor, with its shape and dtype.

    ``dtypes`` are the dtypes of the stored tensors by their names in the links. ``folder`` is named in errors.

    Raises:
        CheckpointError: stored tensors of different dtypes make up one native tensor.
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
        return self._links[name]

    def read(self, name: str, box: Box | None, fill: Fill) -> torch.Tensor:
        """Read a box of a tensor, or all of it, as a contiguous CPU tensor.

        Raises:
            KeyError: there is no tensor with this name.
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
        raise CheckpointError(
            f"{folder}: these tensors are fused into one parameter and must have the same dtype: {listed}"
        )
    return first


_MOST_NAMED = 8
_USUAL_EXPERTS = 1024


class StoredWeights(Protocol):
    """Weights by their stored names, in the files of a folder or in a model in memory."""

    folder: Path
    entries: dict[str, WeightEntry]

    def read(self, name: str, box: Box) -> torch.Tensor:
        """Return a copy of a box of a tensor."""


class LinkedTensors:
    """Native tensors of a model, read from stored weights.

    Raises:
        CheckpointError: the weights do not match the model that the configuration describes.
    """

    def __init__(self, family: Family, config: GPTConfig, weights: StoredWeights) -> None:
        self.config = config
        self.weights = weights
        if config.num_layers > len(weights.entries):
            raise CheckpointError(
                f"{weights.folder} does not match its {CONFIG_FILE}, which describes {config.num_layers} layers, but "
                f"its files contain {len(weights.entries)} tensors"
            )
        num_experts = config.moe.num_experts or 0
        if num_experts > max(_USUAL_EXPERTS, len(weights.entries)):
            raise CheckpointError(
                f"{weights.folder} does not match its {CONFIG_FILE}, which describes {num_experts} experts, but its "
                f"files contain {len(weights.entries)} tensors"
            )
        links = list(family.links(config))
        stored = _find_names(family, config, links, weights)
        links = [dataclasses.replace(link, foreign=stored[link.foreign]) for link in links]
        self._table = LinkTable(
            [link for link in links if not link.is_copy],
            {name: entry.dtype for name, entry in weights.entries.items()},
            weights.folder,
        )
        self.tensors: Mapping[str, TensorInfo] = self._table.tensors
        self._check_tied_copy()
        self._check_copies([link for link in links if link.is_copy and link.foreign in weights.entries])

    def read(self, name: str, box: Box | None = None) -> torch.Tensor:
        """Read a box of a tensor, or all of it, as a contiguous CPU tensor.

        Raises:
            KeyError: there is no tensor with this name.
            CheckpointError: the file that holds the tensor is missing or damaged.
        """
        return self._table.read(name, box, self._fill)

    def _fill(self, link: TensorLink, part: Box, target: torch.Tensor) -> None:
        """Copy a part of a link's box in pieces, which limits the memory for transposing."""
        for piece in split_box(part, target.element_size(), MAX_SHARD_BYTES):
            values = self.weights.read(link.foreign, link.foreign_part(piece))
            target[piece.relative_to(part.offset).slices].copy_(link.to_native(values))

    def _check_tied_copy(self) -> None:
        """Reject files with a separate output layer if config.json ties it to the embedding."""
        if self.config.untie_embeddings_and_output_weights or OUTPUT_LAYER not in self.weights.entries:
            return
        (link,) = self._table.links_of("model.embedding.word_embeddings.weight")
        if not self._are_equal(link, OUTPUT_LAYER):
            raise CheckpointError(
                f"{self.weights.folder}: {CONFIG_FILE} ties the output layer to the embedding, but {OUTPUT_LAYER} "
                f"differs from {link.foreign}; set tie_word_embeddings to false"
            )

    def _check_copies(self, copies: list[TensorLink]) -> None:
        """Reject a duplicate of a tensor that differs from the original."""
        for copy in copies:
            (link,) = self._table.links_of(copy.native)
            if not self._are_equal(link, copy.foreign):
                raise CheckpointError(
                    f"{self.weights.folder}: {copy.foreign} differs from {link.foreign}, but must be a copy of it"
                )

    def _are_equal(self, link: TensorLink, other: str) -> bool:
        """Return whether another stored tensor is bitwise equal to the whole tensor of a link."""
        size = self.weights.entries[link.foreign].dtype.itemsize
        for box in split_box(link.foreign_box, size, MAX_SHARD_BYTES):
            ours, theirs = (self.weights.read(name, box).view(torch.uint8) for name in (link.foreign, other))
            if not torch.equal(ours, theirs):
                return False
        return True


def _find_names(family: Family, config: GPTConfig, links: list[TensorLink], weights: StoredWeights) -> dict[str, str]:
    """Return the name in the files of every tensor of the model.

    Raises:
        CheckpointError: tensors are missing, unexpected or have other shapes; the message lists them by name.
    """
    shapes = shapes_of((link.foreign, link.foreign_box) for link in links)
    stored: dict[str, str] = {}
    for name in shapes:
        stored[name] = next((other for other in names_in_files(family, name) if other in weights.entries), name)
    known = set(stored.values())
    if not config.untie_embeddings_and_output_weights and OUTPUT_LAYER in weights.entries:
        known.add(OUTPUT_LAYER)
        embedding = links[0].foreign
        shapes[OUTPUT_LAYER], stored[OUTPUT_LAYER] = shapes[embedding], OUTPUT_LAYER
    copies = {stored[link.foreign] for link in links if link.is_copy}
    missing = [name for name in stored.values() if name not in weights.entries and name not in copies]
    unexpected = [name for name in weights.entries if name not in known and not family.is_buffer(name, config)]
    problems = [f"missing: {_listed(missing)}"] if missing else []
    problems += [f"unexpected: {_listed(unexpected)}"] if unexpected else []
    problems += [
        f"{stored[name]} has shape {list(weights.entries[stored[name]].shape)}, but {CONFIG_FILE} requires "
        f"{list(shape)}"
        for name, shape in shapes.items()
        if stored[name] in weights.entries and weights.entries[stored[name]].shape != shape
    ][:_MOST_NAMED]
    if problems:
        raise CheckpointError(f"{weights.folder} does not match its {CONFIG_FILE}: {'; '.join(problems)}")
    return stored


def _listed(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMED} more" if len(names) > _MOST_NAMED else ""
    return ", ".join(names[:_MOST_NAMED]) + more
