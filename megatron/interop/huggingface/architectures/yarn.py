"""YaRN in a config.json: the object that stretches rotary positions, read and written."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.settings import Settings, rope_object, whole_base


def read_yarn(settings: Settings, positions: int, default_base: float, *, is_rounded: bool) -> dict[str, Any]:
    """Return the fields of a GPTConfig that say how positions are rotated: as they are, or stretched by YaRN.

    ``is_rounded`` says that the channels between which frequencies are blended are whole numbers in this family.
    """
    scaling = rope_object(settings)
    base = settings.number("rope_theta", default_base)
    if scaling is not None:
        base = scaling.number("rope_theta", base)
    fields: dict[str, Any] = {"rotary_base": whole_base(settings, base, "rope_theta"), "rope_type": "rope"}
    kind = "default" if scaling is None else scaling.text("rope_type", scaling.text("type", "default"))
    if scaling is None or kind == "default":
        return fields
    if kind != "yarn":
        scaling.refuse(f"rope_type {kind!r} is not supported in this family; supported are default, yarn")
        return fields
    scaling.require("truncate", is_rounded, True, "the family's channels are so")
    scaling.require("attention_factor", None, None, "it follows from the factor")
    fields |= {
        "rope_type": "yarn",
        "rotary_scaling_factor": _above_one(scaling),
        "original_max_position_embeddings": scaling.integer("original_max_position_embeddings", positions),
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
    }
    return fields | _amplitudes(scaling)


def write_yarn(config: GPTConfig, *, is_rounded: bool) -> dict[str, Any]:
    """Return the settings of a config.json, in the older form, which every release reads."""
    scaling: dict[str, Any] | None = None
    if config.stretches_positions:
        scaling = {
            "beta_fast": config.beta_fast,
            "beta_slow": config.beta_slow,
            "factor": config.rotary_scaling_factor,
            "original_max_position_embeddings": config.original_max_position_embeddings,
            "rope_type": "yarn",
        }
        if config.mscale_all_dim:
            scaling |= {"mscale": config.mscale, "mscale_all_dim": config.mscale_all_dim}
        if not is_rounded:
            scaling["truncate"] = False
    return {"rope_theta": float(config.rotary_base), "rope_scaling": scaling}


def _amplitudes(scaling: Settings) -> dict[str, Any]:
    """Return what multiplies rotary channels, and scores; ``mscale`` counts beside ``mscale_all_dim`` only."""
    of_all = scaling.number("mscale_all_dim", 0.0)
    if not of_all:
        return {"mscale": 1.0, "mscale_all_dim": 0.0}
    if not scaling.number("mscale", 0.0):
        scaling.refuse("mscale_all_dim is given without mscale; give both or none")
    return {"mscale": scaling.number("mscale", 1.0), "mscale_all_dim": of_all}


def _above_one(scaling: Settings) -> float:
    factor = scaling.number("factor")
    if factor <= 1:
        scaling.refuse(f"factor is {factor}; more than 1 is expected")
    return factor
