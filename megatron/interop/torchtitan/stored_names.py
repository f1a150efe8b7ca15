"""The names that torchtitan gives to the weights of a Llama, and the model that their shapes make."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.mapping import dtype_name
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.architectures.llama import LlamaFamily
from megatron.interop.huggingface.tensor_link import TensorLink, shapes_of
from megatron.interop.torch_dist.stored_metadata import StoredEntry, StoredMetadata, read_metadata

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
"""Their name of what Hugging Face's Llama calls so, below a layer or at the top."""
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
"""What all of torchtitan's Llamas have in common."""


def find_weights(metadata: StoredMetadata) -> dict[str, str]:
    """Return the key of every weight, by its name without the prefix ``model.`` that some releases put before it.

    Raises:
        CheckpointError: there is none, or other tensors are there than weights, optimizer state and buffers.
    """
    keys = [key for key in metadata.tensors if _NO_WEIGHT.fullmatch(key) is None]
    found = {key.removeprefix("model."): key for key in keys}
    if EMBEDDING not in found:
        named = f"it names {_listed(sorted(keys))}" if keys else "it names no tensor"
        raise CheckpointError(
            f"{metadata.path}: without a common.pt beside it this is no checkpoint of Megatron, and without "
            f"{EMBEDDING} none of torchtitan's Llama ({named}); save the model as a Hugging Face folder"
        )
    return found


def read_model(entries: Mapping[str, StoredEntry], told: Mapping[str, Any], place: Path) -> GPTConfig:
    """Return the model that has weights of these shapes; ``told`` has what they do not say, or heads are narrow.

    Raises:
        CheckpointError: no Llama with so many heads has.
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
            f"{place}: {query} rows of queries and {key} rows of keys are not those of {heads} heads; change "
            "--num-attention-heads"
        )
    layers = [int(found[1]) for name in shapes if (found := _THEIR_LAYER.match(name)) is not None]
    dtype = dtype_name(entries[EMBEDDING].dtype)
    return GPTConfig(
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


def recorded_config(folder: Path) -> dict[str, dict[str, Any]]:
    """Return what shapes and types of a folder's weights say of the configuration without anything that was told.

    Raises:
        CheckpointError: the folder is damaged, or of another model.
    """
    metadata = read_metadata(folder)
    entries = {name: metadata.tensors[key] for name, key in find_weights(metadata).items()}
    model = read_model(entries, {"max_position_embeddings": 1}, folder)
    names = ("num_layers", "hidden_size", "ffn_hidden_size", "untie_embeddings_and_output_weights", "bf16", "fp16")
    return {"model": {**ALWAYS, **{name: getattr(model, name) for name in names}}, "data": {}, "tokenizer": {}}


def find_links(config: GPTConfig, entries: Mapping[str, StoredEntry], place: Path) -> list[TensorLink]:
    """Return the links of a model's tensors to the stored ones, by their names without a prefix.

    Raises:
        CheckpointError: tensors are missing, unexpected or of another shape; the first ones are named.
    """
    links = [replace(link, foreign=_their_name(link.foreign)) for link in LlamaFamily().links(config)]
    shapes = shapes_of((link.foreign, link.foreign_box) for link in links)
    missing, unexpected = sorted(shapes.keys() - entries.keys()), sorted(entries.keys() - shapes.keys())
    problems = [f"missing: {_listed(missing)}"] if missing else []
    problems += [f"unexpected: {_listed(unexpected)}"] if unexpected else []
    problems += [
        f"{name}: shape {list(entries[name].shape)} in the files, {list(shape)} by those of the others"
        for name, shape in shapes.items()
        if name in entries and entries[name].shape != shape
    ][:_MOST_NAMED]
    if problems:
        raise CheckpointError(f"{place} does not name the weights of a Llama: {'; '.join(problems)}")
    return links


def _matrix(shapes: Mapping[str, tuple[int, ...]], name: str, place: Path) -> tuple[int, int]:
    """Return the shape of a weight that has to be there.

    Raises:
        CheckpointError: it is not there, or no matrix.
    """
    shape = shapes.get(name)
    if shape is None or len(shape) != 2:
        raise CheckpointError(f"{place} does not name the weights of a Llama: {name} is {shape or 'missing'}")
    return shape[0], shape[1]


def _listed(names: list[str]) -> str:
    return ", ".join(names[:_MOST_NAMED]) + (f" and {len(names) - _MOST_NAMED} more" * (len(names) > _MOST_NAMED))


def _their_name(name: str) -> str:
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return f"{_THEIRS[name.removesuffix('.weight')]}.weight"
    return f"layers.{layer[1]}.{_THEIRS[layer[2]]}.weight"
