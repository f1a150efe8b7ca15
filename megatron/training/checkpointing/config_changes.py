"""How the configuration of a checkpoint differs from the one of the run that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SHAPE_FIELDS: tuple[str, ...] = (
    "num_layers",
    "hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "ffn_hidden_size",
    "vocab_size",
    "position_embedding_type",
    "max_position_embeddings",
    "normalization",
    "apply_layernorm_1p",
    "qk_layernorm",
    "swiglu",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
)
"""Fields of the ``model`` section that decide which weights there are and what they mean."""

WEIGHT_FIELDS: tuple[str, ...] = (
    "num_layers",
    "qk_layernorm",
    "add_bias_linear",
    "add_qkv_bias",
    "untie_embeddings_and_output_weights",
)
"""Those of them that only decide which weights there are: what weights of other names mean does not change."""

_SILENT_SECTIONS = ("checkpoint", "logging")


@dataclass(frozen=True)
class ConfigChange:
    """Hold one field (its path with dots) that differs."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        """Return the change as the log shows it."""
        return f"{self.field}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class ConfigChanges:
    """Split the differences into those of the model's shape, which cannot be loaded, and all others.

    ``weights`` are differences of shape that a load can allow which allows that weights are missing.
    """

    shape: tuple[ConfigChange, ...]
    weights: tuple[ConfigChange, ...]
    other: tuple[ConfigChange, ...]


def compare_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> ConfigChanges:
    """Compare a checkpoint's configuration with the run's, both as nested dicts of plain values.

    Where files go and what is logged is no change, nor is a field that only one release of the program knows.
    The number of positions shapes the model only where positions are learned.
    """
    old_values, new_values = _flatten(old), _flatten(new)
    shape: list[ConfigChange] = []
    weights: list[ConfigChange] = []
    other: list[ConfigChange] = []
    for field in sorted(old_values.keys() & new_values.keys()):
        section, _, name = field.partition(".")
        before, after = old_values[field], new_values[field]
        if before == after or section in _SILENT_SECTIONS:
            continue
        is_shape = section == "model" and name in SHAPE_FIELDS
        if name == "max_position_embeddings":
            is_shape = is_shape and new_values.get("model.position_embedding_type") == "learned_absolute"
        kind = (weights if name in WEIGHT_FIELDS else shape) if is_shape else other
        kind.append(ConfigChange(field, before, after))
    return ConfigChanges(tuple(shape), tuple(weights), tuple(other))


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
