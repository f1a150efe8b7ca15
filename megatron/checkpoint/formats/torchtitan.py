"""Read a torchtitan checkpoint of a Llama model at any layout, as global tensors under native names."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megatron.checkpoint import TensorInfo, refuse_misfits, untrained_common
from megatron.checkpoint.formats.huggingface import LinkTable, LlamaFamily, TensorLink, shapes_of
from megatron.checkpoint.formats.megatron import (
    BoxReader,
    StoredBox,
    StoredEntry,
    StoredMetadata,
    chunk_boxes,
    read_metadata,
)
from megatron.checkpoint.formats.torchtitan_settings import require_told
from megatron.core.config_base import from_fields
from megatron.core.dist_checkpointing import dtype_name
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt import GPTConfig
from megatron.core.sharding import Box
from megatron.core.tokenizers import NullTokenizer

EMBEDDING, OUTPUT_LAYER = "tok_embeddings.weight", "output.weight"
_THEIRS: Mapping[str, str] = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.up_proj": "feed_forward.w3",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
}
"""Maps module names of Hugging Face's Llama, without the layer prefix, to torchtitan's names."""
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)\.weight")
_THEIR_LAYER = re.compile(r"layers\.(\d+)\.")
_NO_WEIGHT = re.compile(r"(?:optimizer|lr_scheduler|train_state|dataloader)(?:\..+)?|(?:.+\.)?freqs_cis")
_MOST_NAMED = 4
ALWAYS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
}
"""Fields that are equal in all of torchtitan's Llama models."""


def find_weights(metadata: StoredMetadata) -> dict[str, str]:
    """Return the key of every weight by its name without the prefix ``model.`` of some releases.

    Raises:
        CheckpointError: there are no weights, or there are tensors other than weights, optimizer state and buffers.
    """
    keys = [key for key in metadata.tensors if _NO_WEIGHT.fullmatch(key) is None]
    found = {key.removeprefix("model."): key for key in keys}
    if EMBEDDING not in found:
        named = f"it names {_listed(sorted(keys))}" if keys else "it lists no tensor"
        raise CheckpointError(
            f"{metadata.path} is neither a Megatron checkpoint (its folder has no common.pt) nor a torchtitan "
            f"checkpoint of Llama (it has no {EMBEDDING}) ({named}); save the model as a Hugging Face folder"
        )
    return found


def read_model(entries: Mapping[str, StoredEntry], told: Mapping[str, Any], place: Path) -> GPTConfig:
    """Return the model with weights of these shapes; ``told`` has the fields that shapes do not determine.

    Without a number of heads in ``told`` the narrowest heads are assumed.

    Raises:
        CheckpointError: no Llama model with this number of heads has these shapes.
    """
    shapes = {name: entry.shape for name, entry in entries.items()}
    vocab_size, width = _matrix(shapes, EMBEDDING, place)
    query, key, ffn = (
        _matrix(shapes, f"layers.0.{name}.weight", place)[0]
        for name in ("attention.wq", "attention.wk", "feed_forward.w1")
    )
    heads = told.get("num_attention_heads", query // 2)
    head_dim = query // heads
    if heads < 1 or query % heads or head_dim % 2 or key % head_dim:
        raise CheckpointError(
            f"{place}: wq has {query} rows and wk has {key} rows, which do not match {heads} heads; change "
            "--num-attention-heads"
        )
    layers = [int(found[1]) for name in shapes if (found := _THEIR_LAYER.match(name)) is not None]
    dtype = dtype_name(entries[EMBEDDING].dtype)
    return from_fields(
        GPTConfig,
        num_layers=max(layers) + 1,
        hidden_size=width,
        ffn_hidden_size=ffn,
        kv_channels=head_dim,
        num_query_groups=key // head_dim,
        group_query_attention=key != query,
        vocab_size=vocab_size,
        untie_embeddings_and_output_weights=OUTPUT_LAYER in shapes,
        **ALWAYS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bf16=dtype == "bfloat16",
        fp16=dtype == "float16",
        params_dtype=dtype,
        **{"num_attention_heads": heads, **told},
    )


def recorded_torchtitan_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the configuration that follows from the shapes and dtypes of a folder's weights alone.

    Raises:
        CheckpointError: the folder is damaged, or holds another model.
    """
    metadata = read_metadata(folder)
    entries = {name: metadata.tensors[key] for name, key in find_weights(metadata).items()}
    model = read_model(entries, {"max_position_embeddings": 1}, folder)
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "untie_embeddings_and_output_weights", "bf16", "fp16")
    return {"model": {**ALWAYS, **{name: getattr(model, name) for name in names}}, "data": {}, "tokenizer": {}}


def find_links(config: GPTConfig, entries: Mapping[str, StoredEntry], place: Path) -> list[TensorLink]:
    """Return the links of a model's tensors to the stored tensors, by their names without a prefix.

    Raises:
        CheckpointError: tensors are missing, unexpected or have other shapes; the message lists the first ones.
    """
    links = list(LlamaFamily().links(config))
    unnamed = sorted({link.foreign for link in links if not _has_name(link.foreign)})
    if unnamed:
        raise CheckpointError(f"{place}: torchtitan's format has no tensor for {_listed(unnamed)}")
    links = [replace(link, foreign=_their_name(link.foreign)) for link in links]
    shapes = shapes_of((link.foreign, link.foreign_box) for link in links)
    missing, unexpected = sorted(shapes.keys() - entries.keys()), sorted(entries.keys() - shapes.keys())
    problems = [f"missing: {_listed(missing)}"] if missing else []
    problems += [f"unexpected: {_listed(unexpected)}"] if unexpected else []
    problems += [
        f"{name}: shape {list(entries[name].shape)} in the files, but {list(shape)} according to the other tensors"
        for name, shape in shapes.items()
        if name in entries and entries[name].shape != shape
    ][:_MOST_NAMED]
    if problems:
        raise CheckpointError(f"{place} does not list the weights of a Llama model: {'; '.join(problems)}")
    return links


def _matrix(shapes: Mapping[str, tuple[int, ...]], name: str, place: Path) -> tuple[int, int]:
    """Return the shape of a required weight matrix.

    Raises:
        CheckpointError: the weight is missing, or not a matrix.
    """
    shape = shapes.get(name)
    if shape is None or len(shape) != 2:
        raise CheckpointError(
            f"{place} does not list the weights of a Llama model: {name} "
            f"{f'has shape {shape}' if shape else 'is missing'}"
        )
    return shape[0], shape[1]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" * (len(names) > _MOST_NAMED))


def _has_name(name: str) -> bool:
    layer = _LAYER.fullmatch(name)
    return (name.removesuffix(".weight") if layer is None else layer[2]) in _THEIRS


def _their_name(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return f"{_THEIRS[name.removesuffix('.weight')]}.weight"
    return f"layers.{layer[1]}.{_THEIRS[layer[2]]}.weight"


_ROTATED = (".attention.wq.weight", ".attention.wk.weight")
"""Name suffixes of weights whose output channels are rotated by RoPE."""


class TorchtitanSource:
    """Weights of a torchtitan folder; implements `CheckpointSource`. The optimizer state is ignored.

    ``values`` are the fields of a `GPTConfig` that the files do not record (see `require_told`).

    Raises:
        CheckpointError: the files do not hold a Llama model, or required ``values`` are missing.
        DamagedCheckpointError: a file is missing or damaged.
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
        """Read a box of a tensor, or all of it, as a contiguous CPU tensor.

        Raises:
            KeyError: there is no tensor with this name.
            CheckpointError: the file that holds the tensor is missing or damaged.
        """
        return self._table.read(name, box, self._fill)

    def check_storages(self, index: int = 0, count: int = 1) -> None:
        """Verify the checksums of every ``count``-th entry of a weight, starting at ``index``.

        Raises:
            DamagedCheckpointError: an entry does not match its stored checksum; the message names the tensor.
        """
        self.metadata.check_storages(frozenset(self._keys.values()), index, count)

    def close(self) -> None:
        """Close the files; nothing can be read afterwards."""
        self._reader.close()

    def _fill(self, link: TensorLink, part: Box, target: torch.Tensor) -> None:
        """Copy a part of a link's box, with the rows of each head in native order."""
        if link.foreign.endswith(_ROTATED) and not self.config.rotary_interleaved:
            target.copy_(self._half_split(link, part, target.dtype))
        else:
            target.copy_(self._read_part(link, part, target.dtype))

    def _half_split(self, link: TensorLink, part: Box, dtype: torch.dtype) -> torch.Tensor:
        """Return a part of a link's box with the rows of each head in native order.

        torchtitan rotates the channels 2i and 2i + 1 of a head together, the native format i and d/2 + i.
        """
        whole = link.native_box
        columns = Box((whole.offset[0], part.offset[1]), (whole.shape[0], part.shape[1]))
        values = self._read_part(link, columns, dtype)
        pairs = values.view(-1, self.config.kv_channels // 2, 2, values.shape[1])
        return pairs.transpose(1, 2).reshape(values.shape)[part.relative_to(columns.offset).slices]

    def _read_part(self, link: TensorLink, part: Box, dtype: torch.dtype) -> torch.Tensor:
        return self._reader.read(self._keys[link.foreign], link.foreign_part(part), dtype, self._boxes[link.foreign])
