"""Positions stretched by YaRN in the ``args`` of Megatron's files, in models without latent attention.

There YaRN is a kind of position embedding. What it is made from has the names that Megatron's model asks its
configuration for; those of latent attention are others (see `latent_arguments`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config_base import field_specs
from megatron.core.models.gpt.gpt_config import STRETCH_FIELDS, GPTConfig
from megatron.core.transformer.transformer_config import LatentConfig
from megatron.interop.megatron_torch.experts.latent_arguments import field_value

YARN = "yarn"
_KIND = "position_embedding_type"
_NEEDED = ("rotary_scaling_factor", "original_max_position_embeddings")


def _name_in_args(field: str) -> str:
    return field if field.startswith(YARN) else f"{YARN}_{field}"


def config_of_yarn(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of the model's configuration that say how positions are stretched; none where they are not.

    Raises:
        CheckpointError: a value is missing, or of another type than its field.
    """
    if arguments.get(_KIND) != YARN or arguments.get("multi_latent_attention"):
        return {}
    values: dict[str, Any] = {_KIND: "rope", "rope_type": YARN}
    config_class: type = LatentConfig
    for spec in field_specs(config_class):
        if spec.name not in STRETCH_FIELDS:
            continue
        name = _name_in_args(spec.name)
        value = arguments.get(name)
        if value is not None or spec.name in _NEEDED:
            values[spec.name] = field_value(spec, name, value)
    if not {"mscale", "mscale_all_dim"} <= values.keys():
        # Without either of them Megatron takes neither.
        values = {name: value for name, value in values.items() if name not in ("mscale", "mscale_all_dim")}
    return values


def arguments_of_yarn(model: GPTConfig) -> dict[str, Any]:
    """Return the values of ``args`` that say the same; nothing where positions are not stretched so."""
    if model.multi_latent_attention or model.rope_type != YARN:
        return {}
    return {_KIND: YARN} | {_name_in_args(name): getattr(model, name) for name in STRETCH_FIELDS}
