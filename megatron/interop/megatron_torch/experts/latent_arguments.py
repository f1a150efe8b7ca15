"""Latent attention and further tokens in the ``args`` of Megatron's files, which name all their fields in any model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config_base import FieldSpec, field_specs
from megatron.core.errors import CheckpointError
from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.transformer_config import LatentConfig, PredictionConfig

_KINDS: Mapping[str, type] = {"multi_latent_attention": LatentConfig, "mtp_num_layers": PredictionConfig}
"""The argument that says whether a model has something, and the fields that describe it."""


def config_of_latent(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the model's configuration that describe its latent attention and its further tokens.

    Raises:
        CheckpointError: a value is of another type than its field.
    """
    values: dict[str, Any] = {}
    for switch, kind in _KINDS.items():
        for spec in field_specs(kind) if arguments.get(switch) else ():
            value = arguments.get(spec.name)
            if value is not None:
                values[spec.name] = field_value(spec, spec.name, value)
    return values


def field_value(spec: FieldSpec, name: str, value: Any) -> Any:
    """Return a value that ``args`` has under a name, as its field holds it.

    Raises:
        CheckpointError: it is of another type than the field.
    """
    allowed: tuple[type, ...] = (int, float) if spec.item_type is float else (spec.item_type,)
    if type(value) not in allowed:
        raise CheckpointError(f"args.{name} is {value!r}; a value of type {spec.item_type.__name__} is expected")
    return spec.item_type(value)


def arguments_of_latent(model: GPTConfig) -> dict[str, Any]:
    """Return the values of ``args`` that say the same; nothing but that there is none, where there is none."""
    values: dict[str, Any] = {"multi_latent_attention": False, "mtp_num_layers": None}
    for switch, kind in _KINDS.items():
        if getattr(model, switch):
            values |= {spec.name: getattr(model, spec.name) for spec in field_specs(kind)}
    return values
