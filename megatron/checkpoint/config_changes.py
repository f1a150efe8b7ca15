"""Compare a checkpoint's recorded configuration and LoRA adapters with those of the run that loads it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config import config_parts
from megatron.core.config_base import config_from_dict, field_specs
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.errors import CheckpointError
from megatron.core.transformer import (
    ADAPTERS,
    GATED_ACTIVATIONS,
    TRANSFORMER_LAYERS,
    HybridConfig,
    MoEConfig,
    adapted_parts,
    layer_parts,
    linear_layers_of,
    moe_layers,
    plain_names,
)


@dataclass(frozen=True)
class ConfigChange:
    """Field that differs, with its dotted path."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.field}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class ConfigChanges:
    """Differences by their consequence for a load.

    A load rejects ``shape`` differences. It rejects ``weights`` differences unless weights may be missing. All
    ``other`` differences are logged.
    """

    shape: tuple[ConfigChange, ...]
    weights: tuple[ConfigChange, ...]
    other: tuple[ConfigChange, ...]


def compare_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> ConfigChanges:
    """Compare a checkpoint's configuration with the run's, both as nested dicts of plain values.

    The role of a field decides. Differences in fields of the output or of one session are ignored, as are fields that
    only one release knows. A field determines the model's shape only if it is in use, such as the number of positions
    with learned embeddings.
    """
    old_values, new_values = _flatten(old), _flatten(new)
    fields = {f"{part}.{spec.name}": spec.options for part, cls in config_parts().items() for spec in field_specs(cls)}
    unused = set(_unused_widths(new_values))
    changes: dict[str, list[ConfigChange]] = {"shape": [], "weights": [], "other": []}
    for field in sorted(old_values.keys() & new_values.keys()):
        section, _, _ = field.partition(".")
        before, after = old_values[field], new_values[field]
        role, where = (fields[field].role, fields[field].where) if field in fields else (None, None)
        if before == after or role in ("session", "output"):
            continue
        if field == _LAYERS and _are_same_layers(before, after, new_values):
            continue
        counts = where is None or new_values.get(f"{section}.{where[0]}") == where[1]
        counts = counts and field not in unused
        kind = role if role in ("shape", "weights") and counts else "other"
        changes[kind].append(ConfigChange(field, before, after))
    return ConfigChanges(**{kind: tuple(found) for kind, found in changes.items()})


_LAYERS = "model.moe_layer_freq"


def _unused_widths(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the width fields that no layer of the model uses."""
    if values.get("model.multi_latent_attention"):
        yield "model.kv_channels"
    if values.get("model.num_experts") is not None:
        layers = _layers_with_experts(values.get(_LAYERS, "1"), values)
        if layers is not None and all(layers):
            yield "model.ffn_hidden_size"


def _layers_with_experts(pattern: Any, values: Mapping[str, Any]) -> tuple[bool, ...] | None:
    """Return whether each layer has experts according to a pattern, or None if the pattern is invalid."""
    try:
        return moe_layers(MoEConfig(num_experts=1, moe_layer_freq=str(pattern)), values["model.num_layers"])
    except ValueError:
        return None


def _are_same_layers(before: Any, after: Any, values: Mapping[str, Any]) -> bool:
    """Return whether two patterns, possibly written differently, give experts to the same layers."""
    old, new = (_layers_with_experts(pattern, values) for pattern in (before, after))
    return old is not None and old == new


def without_new_adapters(
    tensors: Iterable[ShardedTensor], folder: Path, stored: Iterable[str], config: Mapping[str, Any], is_base: bool
) -> list[ShardedTensor]:
    """Return the tensors that a checkpoint fills, without adapters that the run newly adds to a base model.

    ``is_base`` states that only weights are loaded from the checkpoint.

    Raises:
        CheckpointError: the run trains adapters and would resume from a checkpoint without adapters.
    """
    tensors = list(tensors)
    if not config.get("model", {}).get("lora_rank") or any(ADAPTERS in name for name in stored):
        return tensors
    if not is_base:
        raise CheckpointError(
            f"checkpoint {folder} contains no LoRA adapters, but --lora-rank trains them; add --finetune to start new "
            "adapters from its weights"
        )
    return [tensor for tensor in tensors if ADAPTERS not in tensor.name]


def refuse_other_adapters(folder: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Reject a checkpoint whose adapters the run lacks or configures differently.

    ``old`` and ``new`` are the configurations of the checkpoint and of the run.

    Raises:
        CheckpointError: the rank, alpha or the adapted layers differ.
    """
    # A checkpoint with unquantized weights fills a run with quantized weights, but not the reverse.
    is_quantized = bool(old.get("model", {}).get("lora_base_quantization"))
    before, after = _settings(old, is_quantized), _settings(new, is_quantized)
    if before is not None and before != after:
        found = "none" if after is None else after
        raise CheckpointError(
            f"checkpoint {folder} contains LoRA adapters ({before}), but this run has {found}; pass these flags, or "
            "merge the adapters into their model with tools/checkpoint/convert.py --merge-lora"
        )


def _linear_layers(model: Mapping[str, Any]) -> Sequence[str]:
    """Return the names of the linear layers of a model, given its stored configuration."""
    names = {spec.name for spec in field_specs(HybridConfig)} & model.keys()
    hybrid = config_from_dict(HybridConfig, {name: model[name] for name in names})
    if not hybrid.is_hybrid:
        return TRANSFORMER_LAYERS
    return linear_layers_of(layer_parts(hybrid, model["num_layers"], (False,) * model["num_layers"]))


def _settings(config: Mapping[str, Any], with_quantization: bool) -> str | None:
    """Return the flags of a configuration's adapters and of its quantized weights, or None without adapters."""
    model = config.get("model", {})
    if not model.get("lora_rank"):
        return None
    is_gated = any(model.get(name) for name in GATED_ACTIVATIONS)
    names = plain_names(adapted_parts(model["lora_target_modules"], is_gated, _linear_layers(model)))
    flags = [
        f"--lora-rank {model['lora_rank']} --lora-alpha {model['lora_alpha']} --lora-target-modules {' '.join(names)}"
    ]
    if with_quantization and model["lora_base_quantization"]:
        flags.append(f"--lora-base-quantization {model['lora_base_quantization']}")
        flags += [] if model["lora_double_quantization"] else ["--no-lora-double-quantization"]
    return " ".join(flags)


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
