"""Rotary positions as a config.json writes them, in the older and in the newer form."""

from __future__ import annotations

from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.interop.huggingface.settings import Settings

_DEFAULT_BASE = 10000.0
_TYPES = ("default", "linear", "llama3")


def read_rope(settings: Settings, max_position_embeddings: int) -> dict[str, Any]:
    """Return the fields of a GPTConfig that describe the rotary positions.

    The newer form is one object, ``rope_parameters``; the older one has ``rope_theta`` apart and puts what scales the
    frequencies into ``rope_scaling``.
    """
    settings.require("partial_rotary_factor", 1.0, 1.0, "every channel of a head is rotated")
    scaling = settings.inner("rope_parameters") or settings.inner("rope_scaling")
    base = settings.number("rope_theta", _DEFAULT_BASE)
    if scaling is None:
        return _base(settings, base)
    scaling.require("partial_rotary_factor", 1.0, 1.0, "every channel of a head is rotated")
    fields = _base(settings, scaling.number("rope_theta", base))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "linear":
        fields["rotary_seq_len_interpolation_factor"] = _at_least_one(scaling)
    elif kind == "llama3":
        fields |= _read_llama3(scaling, max_position_embeddings)
    elif kind != "default":
        scaling.refuse(f"rope_type {kind!r} is not supported; supported are {', '.join(_TYPES)}")
    return fields


def write_rope(config: GPTConfig) -> dict[str, Any]:
    """Return the settings of a config.json, in the older form, which every release reads."""
    scaling: dict[str, Any] | None = None
    if config.use_rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling_original_max_position_embeddings,
        }
    elif config.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    return {"rope_theta": float(config.rotary_base), "rope_scaling": scaling}


def _base(settings: Settings, base: float) -> dict[str, Any]:
    if base < 1 or base != int(base):
        settings.refuse(f"rope_theta is {base}; a whole number is expected")
        base = _DEFAULT_BASE
    return {"rotary_base": int(base)}


def _read_llama3(scaling: Settings, max_position_embeddings: int) -> dict[str, Any]:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high and not scaling.problems:
        scaling.refuse(f"low_freq_factor {low} is not below high_freq_factor {high}")
    return {
        "use_rope_scaling": True,
        "rope_scaling_factor": _at_least_one(scaling),
        "rope_scaling_low_freq_factor": low,
        "rope_scaling_high_freq_factor": high,
        "rope_scaling_original_max_position_embeddings": scaling.integer(
            "original_max_position_embeddings", max_position_embeddings
        ),
    }


def _at_least_one(scaling: Settings) -> float:
    factor = scaling.number("factor")
    if factor < 1:
        scaling.refuse(f"factor is {factor}; at least 1 is expected")
    return factor
