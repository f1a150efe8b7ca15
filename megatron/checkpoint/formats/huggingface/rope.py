"""RoPE settings in config.json: base and frequency scaling."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig

_DEFAULT_BASE = 10000.0
_TYPES = ("default", "linear", "llama3", "yarn")


def read_rope(settings: Settings, max_position_embeddings: int, default_base: float = _DEFAULT_BASE) -> dict[str, Any]:
    """Return the GPTConfig fields of RoPE over all channels of a head.

    The newer form is one object, ``rope_parameters``. The older form has a separate ``rope_theta``, and the frequency
    scaling in ``rope_scaling``.
    """
    scaling = rope_object(settings)
    for place in (settings, scaling):
        if place is not None:
            place.require("partial_rotary_factor", 1.0, 1.0, "partial rotary embeddings are not supported")
    return read_frequencies(settings, scaling, max_position_embeddings, settings.number("rope_theta", default_base))


def read_partial_rope(
    settings: Settings,
    max_position_embeddings: int,
    base_name: str,
    share_name: str,
    default_share: float,
    default_base: float = _DEFAULT_BASE,
) -> dict[str, Any]:
    """Return the fields of partial RoPE, with the fraction of rotated channels.

    The older form has the base under ``base_name`` and the fraction under ``share_name``.
    """
    share = settings.number(share_name, default_share)
    newer = rope_object(settings)
    if newer is not None:
        share = newer.number("partial_rotary_factor", share)
    if not 0 < share <= 1:
        settings.refuse(f"{share_name} is {share}; a number above 0 and up to 1 is expected")
        share = 1.0
    base = settings.number(base_name, default_base)
    return read_frequencies(settings, newer, max_position_embeddings, base) | {"rotary_percent": share}


def read_ntk_rope(settings: Settings, positions: int, default_base: float = _DEFAULT_BASE) -> dict[str, Any]:
    """Return the fields of RoPE whose type may be ``dynamic`` with an ``alpha``, which scales the base only."""
    scaling = rope_object(settings)
    kind = None if scaling is None else scaling.text("rope_type", scaling.text("type", "default"))
    if scaling is None or kind != "dynamic" or not scaling.values.get("alpha"):
        return read_rope(settings, positions, default_base)
    unscaled = settings.replaced({"rope_scaling": {**scaling.values, "rope_type": "default"}})
    fields = read_rope(unscaled, positions, default_base)
    return fields | {"rotary_ntk_alpha": scaling.positive("alpha", 1.0)}


def read_rotated_channels(settings: Settings, name: str, default: int, head_dim: int) -> float:
    """Return ``--rotary-percent`` for the number of rotated channels per head in the setting ``name``."""
    channels = settings.integer(name, default)
    if channels % 2 or channels > head_dim:
        settings.refuse(f"{name} is {channels}; an even number up to the head size, {head_dim}, is expected")
        return 1.0
    share = channels / head_dim
    # The model rounds the product down: 30 / 44 * 44 is less than 30.
    return share if int(head_dim * share) == channels else math.nextafter(share, 1.0)


def rope_object(settings: Settings) -> Settings | None:
    """Return the object with the RoPE settings, if there is one.

    If a folder has both ``rope_scaling`` and ``rope_parameters``, transformers uses ``rope_scaling``.
    """
    return settings.inner("rope_scaling" if settings.values.get("rope_scaling") else "rope_parameters")


def with_default_rope(settings: Settings, default: dict[str, Any]) -> Settings:
    """Return the settings with the RoPE object of an architecture's configuration class if they have none.

    The problems are still recorded in ``settings``.
    """
    if rope_object(settings) is not None:
        return settings
    for name in ("rope_scaling", "rope_parameters"):
        if name in settings.values:
            settings.refuse(f"{name} is null, which releases of transformers interpret differently; set its rope_type")
            break
    return settings.replaced({"rope_scaling": default, "rope_parameters": None})


def read_frequencies(
    settings: Settings, scaling: Settings | None, max_position_embeddings: int, base: float
) -> dict[str, Any]:
    """Return the fields of the base, which ``scaling`` may override, and of the frequency scaling."""
    if scaling is None:
        return _base(settings, base)
    fields = _base(settings, scaling.number("rope_theta", base))
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind == "linear":
        fields["rotary_seq_len_interpolation_factor"] = _at_least_one(scaling)
    elif kind == "llama3":
        fields |= _read_llama3(scaling, max_position_embeddings)
    elif kind == "yarn":
        fields |= _read_stretching(scaling, max_position_embeddings) | _read_attention_factor(scaling)
    elif kind != "default":
        scaling.refuse(f"rope_type {kind!r} is not supported; supported types are {', '.join(_TYPES)}")
    return fields


def write_rope(config: GPTConfig) -> dict[str, Any]:
    """Return the RoPE settings in the older form, which every release of transformers reads."""
    scaling: dict[str, Any] | None = None
    if config.use_rope_scaling:
        scaling = {
            "rope_type": "llama3",
            "factor": config.rope_scaling_factor,
            "low_freq_factor": config.rope_scaling_low_freq_factor,
            "high_freq_factor": config.rope_scaling_high_freq_factor,
            "original_max_position_embeddings": config.rope_scaling_original_max_position_embeddings,
        }
    elif config.stretches_positions:
        scaling = _written_stretching(config)
    elif config.rotary_seq_len_interpolation_factor is not None:
        scaling = {"rope_type": "linear", "factor": config.rotary_seq_len_interpolation_factor}
    return {"rope_theta": float(config.rotary_base), "rope_scaling": scaling}


def read_kinds_of_rope(
    settings: Settings, default: Mapping[str, Any], has_window: Sequence[bool], width: int, positions: int
) -> dict[str, Any]:
    """Return the fields of ``rope_parameters`` with an object per kind of layer, unscaled in layers with a window.

    ``default`` are the objects if the setting is absent, ``width`` is the head size of layers without a window.
    """
    kinds = settings.inner("rope_parameters") or Settings(dict(default), settings.place, settings.problems)
    full, sliding = kinds.inner("full_attention"), kinds.inner("sliding_attention")
    if full is None or (any(has_window) and sliding is None):
        settings.refuse("rope_parameters must have the objects full_attention and sliding_attention")
        return {}
    fields = _read_proportional(full, width, positions)
    if sliding is not None and any(has_window):
        sliding.require("rope_type", "default", "default", "sliding-window layers use unscaled RoPE frequencies")
        base = sliding.number("rope_theta", _DEFAULT_BASE)
        fields["rotary_base_local"] = checked_base(settings, base, "the rope_theta of sliding-window layers")
    return fields


def _read_proportional(scaling: Settings, width: int, positions: int) -> dict[str, Any]:
    """Return the fields of one kind of layers, whose RoPE may be proportional."""
    kind = scaling.text("rope_type", "default")
    if kind != "proportional":
        if kind != "default":
            scaling.require("partial_rotary_factor", 1.0, 1.0, "only proportional RoPE is partial")
        return read_frequencies(scaling, scaling, positions, _DEFAULT_BASE)
    share, factor = scaling.number("partial_rotary_factor", 1.0), scaling.positive("factor", 1.0)
    if not 2 <= width * share <= width:
        scaling.refuse(f"partial_rotary_factor is {share}; 2 to all of the {width} channels of a head must rotate")
        share = 1.0
    return {
        **_base(scaling, scaling.number("rope_theta", _DEFAULT_BASE)),
        "rope_type": "proportional",
        "rotary_percent": share,
        "rotary_seq_len_interpolation_factor": None if factor == 1.0 else factor,
    }


def write_kinds_of_rope(config: GPTConfig) -> dict[str, Any]:
    """Return ``rope_parameters`` with an object for each kind of layer that the model has."""
    full: dict[str, Any] = write_rope(config)["rope_scaling"] or {"rope_type": "default"}
    if config.rope.rope_type == "proportional":
        full = {"rope_type": "proportional", "partial_rotary_factor": config.rotary_percent}
        if config.rotary_seq_len_interpolation_factor is not None:
            full["factor"] = config.rotary_seq_len_interpolation_factor
    kinds = {"full_attention": {"rope_theta": float(config.rotary_base), **full}}
    if any(config.layer_windows):
        base = config.rotary_base if config.rotary_base_local is None else config.rotary_base_local
        kinds["sliding_attention"] = {"rope_theta": float(base), "rope_type": "default"}
    return {"rope_parameters": kinds}


def _base(settings: Settings, base: float) -> dict[str, Any]:
    return {"rotary_base": checked_base(settings, base, "rope_theta")}


def checked_base(settings: Settings, base: float, name: str) -> float:
    """Return a RoPE base; reject values below 1 under the setting's ``name``."""
    if base < 1:
        settings.refuse(f"{name} is {base}; 1 or more is expected")
        return _DEFAULT_BASE
    return base


def _read_llama3(scaling: Settings, max_position_embeddings: int) -> dict[str, Any]:
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    if low >= high and not scaling.problems:
        scaling.refuse(f"low_freq_factor {low} must be less than high_freq_factor {high}")
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
        scaling.refuse(f"factor is {factor}; a number of 1 or more is expected")
    return factor


def read_yarn(settings: Settings, positions: int, default_base: float) -> dict[str, Any]:
    """Return the RoPE fields of a GPTConfig with MLA: unscaled, or scaled with YaRN."""
    scaling = rope_object(settings)
    base = settings.number("rope_theta", default_base)
    if scaling is not None:
        base = scaling.number("rope_theta", base)
    fields: dict[str, Any] = {"rotary_base": checked_base(settings, base, "rope_theta"), "rope_type": "rope"}
    kind = "default" if scaling is None else scaling.text("rope_type", scaling.text("type", "default"))
    if scaling is None or kind == "default":
        return fields
    if kind != "yarn":
        scaling.refuse(
            f"rope_type {kind!r} is not supported for this architecture; supported types are default and yarn"
        )
        return fields
    scaling.require("attention_factor", None, None, "it is computed from the factor")
    return fields | _read_stretching(scaling, positions)


def _read_stretching(scaling: Settings, positions: int) -> dict[str, Any]:
    """Return the fields of YaRN."""
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": _above_one(scaling),
        "original_max_position_embeddings": scaling.integer("original_max_position_embeddings", positions),
        "beta_fast": scaling.positive("beta_fast", 32.0),
        "beta_slow": scaling.positive("beta_slow", 1.0),
        "yarn_correction_range_round_to_int": scaling.switch("truncate", True),
        **_amplitudes(scaling),
    }


def _read_attention_factor(scaling: Settings) -> dict[str, Any]:
    """Return the mscale fields that give the ``attention_factor``; empty if it is absent or the factor is 1."""
    wanted = scaling.positive_or_none("attention_factor", None)
    growth = math.log(max(scaling.number("factor", 1.0), 1.0)) / 10
    if wanted is None or not growth:
        return {}
    if math.isclose(wanted, 1 + growth, rel_tol=1e-9):
        return {"mscale": 1.0, "mscale_all_dim": 0.0}
    # Rounded, so that writing and reading the value gives the same value.
    if wanted >= 1:
        return {"mscale": round((wanted - 1) / growth, 12), "mscale_all_dim": 0.0}
    return {"mscale": 0.0, "mscale_all_dim": round((1 / wanted - 1) / growth, 12)}


def _written_stretching(config: GPTConfig) -> dict[str, Any]:
    """Return YaRN's ``rope_scaling`` object."""
    yarn = config.rope
    scaling: dict[str, Any] = {
        "beta_fast": yarn.beta_fast,
        "beta_slow": yarn.beta_slow,
        "factor": yarn.rotary_scaling_factor,
        "original_max_position_embeddings": yarn.original_max_position_embeddings,
        "rope_type": "yarn",
    }
    if not yarn.yarn_correction_range_round_to_int:
        scaling["truncate"] = False
    is_factor = not config.mla.multi_latent_attention and 0.0 in (yarn.mscale, yarn.mscale_all_dim)
    if is_factor and (yarn.mscale, yarn.mscale_all_dim) != (1.0, 0.0):
        scaling["attention_factor"] = config.rotary_amplitude
    elif yarn.mscale_all_dim:
        scaling |= {"mscale": yarn.mscale, "mscale_all_dim": yarn.mscale_all_dim}
    return scaling


def _amplitudes(scaling: Settings) -> dict[str, Any]:
    """Return the mscale fields; ``mscale`` is used only together with ``mscale_all_dim``."""
    of_all = scaling.number("mscale_all_dim", 0.0)
    if not of_all:
        return {"mscale": 1.0, "mscale_all_dim": 0.0}
    if not scaling.number("mscale", 0.0):
        scaling.refuse("mscale_all_dim is set without mscale; set both or neither")
    return {"mscale": scaling.number("mscale", 1.0), "mscale_all_dim": of_all}


def _above_one(scaling: Settings) -> float:
    factor = scaling.number("factor")
    if factor <= 1:
        scaling.refuse(f"factor is {factor}; a number above 1 is expected")
    return factor
