"""Settings and tensors of layers with the keys and values of other layers, and of per-layer input embeddings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import key_value_sources

_SHARED, _WIDTH, _ROWS = "num_kv_shared_layers", "hidden_size_per_layer_input", "vocab_size_per_layer_input"
_KEYS_AND_VALUES = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:k_proj|v_proj|k_norm|v_norm)\..*")


def read_sharing(settings: Settings, has_window: Sequence[bool]) -> dict[str, Any]:
    """Return the fields of layers with the keys and values of other layers; ``has_window`` says which may be alike."""
    shared = settings.integer(_SHARED, 0, least=0)
    if shared:
        try:
            key_value_sources(tuple(has_window), shared)
        except ValueError as error:
            settings.refuse(f"{_SHARED} is {shared}: {error}")
            shared = 0
    is_wide = settings.switch("use_double_wide_mlp", False)
    if is_wide and shared and settings.switch("enable_moe_block", False):
        settings.refuse("use_double_wide_mlp is true, but layers with experts do not support it")
    return {_SHARED: shared, "use_double_wide_mlp": is_wide and shared > 0}


def read_inputs(settings: Settings, default_width: int, default_rows: int) -> dict[str, Any]:
    """Return the field of per-layer inputs, whose table must have as many rows as the word embeddings."""
    width = settings.integer(_WIDTH, default_width, least=0)
    rows, words = settings.integer(_ROWS, default_rows), settings.integer("vocab_size")
    if width and rows != words:
        settings.refuse(f"{_ROWS} is {rows}, but only vocab_size, {words}, is supported")
    return {_WIDTH: width}


def written_sharing(config: GPTConfig) -> dict[str, Any]:
    """Return the settings of shared keys and values, and of per-layer inputs."""
    settings = {_SHARED: config.num_kv_shared_layers, _WIDTH: config.hidden_size_per_layer_input}
    settings["use_double_wide_mlp"] = config.use_double_wide_mlp
    return settings | ({_ROWS: config.vocab_size} if config.hidden_size_per_layer_input else {})


def input_links(config: GPTConfig, prefix: str) -> Iterator[TensorLink]:
    """Yield the links of the tensors that compute the inputs of all layers."""
    width = config.hidden_size_per_layer_input
    if width:
        ours, total = "model.embedding.per_layer.", config.num_layers * width
        yield whole(
            f"{ours}word_embeddings.weight", f"{prefix}embed_tokens_per_layer.weight", (config.vocab_size, total)
        )
        projection = f"{prefix}per_layer_model_projection.weight"
        yield whole(f"{ours}projection.weight", projection, (total, config.hidden_size))
        yield whole(f"{ours}norm.weight", f"{prefix}per_layer_projection_norm.weight", (width,))


def branch_links(config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
    """Yield the links of the branch of a layer that reads the layer's input."""
    hidden, width = config.hidden_size, config.hidden_size_per_layer_input
    if width:
        branch = f"{ours}per_layer_input."
        yield whole(f"{branch}gate.weight", f"{theirs}per_layer_input_gate.weight", (width, hidden))
        yield whole(f"{branch}projection.weight", f"{theirs}per_layer_projection.weight", (hidden, width))
        yield whole(f"{branch}norm.weight", f"{theirs}post_per_layer_input_norm.weight", (hidden,))


def is_unused(config: GPTConfig, name: str) -> bool:
    """Return whether files have a tensor for keys or values of a layer that uses another layer's."""
    found = _KEYS_AND_VALUES.fullmatch(name)
    number = int(found[1]) if found else config.num_layers
    return number < config.num_layers and config.key_value_sources[number] is not None
