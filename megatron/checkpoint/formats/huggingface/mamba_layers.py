"""Mamba-2 layers: their settings and tensors, and layers that ours represent as a mixer and a feed-forward each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import FULL, RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import ATTENTION, MAMBA, LayerParts

LINEAR = "linear_attention"
_INFINITY = {"__float__": "Infinity"}
"""Infinity as transformers 5 writes it."""
_OLDER_NAMES = {"mamba": LINEAR, "attention": FULL}
"""Names of kinds of layers in transformers 5, by their names in transformers 4."""


def read_kinds(settings: Settings, name: str, kinds: Any, symbols: Mapping[str, str]) -> str:
    """Return the symbols of the layers of a list of their kinds, which a string may already contain.

    ``name`` is the name of the setting.
    """
    if isinstance(kinds, str) and set(kinds) <= set(symbols.values()):
        return kinds
    listed = [_OLDER_NAMES.get(kind, kind) for kind in map(str, kinds if isinstance(kinds, list) else [kinds])]
    unknown = sorted({kind for kind in listed if kind not in symbols})
    if unknown:
        settings.refuse(f"{name} contains {', '.join(unknown)}; supported values are {', '.join(symbols)}")
    return "".join(symbols.get(kind, "*") for kind in listed)


def read_mixers(settings: Settings) -> str:
    """Return the symbols of the layers' mixers according to ``layer_types`` or its other name; Mamba-2 by default."""
    layers, name = min(settings.integer("num_hidden_layers"), 100_000), "layer_types"
    if settings.values.get(name) is None:
        name = "layers_block_type"
    kinds = settings.values.get(name)
    mixers = read_kinds(settings, name, [LINEAR] * layers if kinds is None else kinds, {LINEAR: "M", FULL: "*"})
    if len(mixers) != layers:
        settings.refuse(f"{name} has {len(mixers)} entries, but the model has {layers} layers")
    return mixers


def written_mixers(config: GPTConfig) -> list[str]:
    """Return ``layer_types`` of a model whose layers have a mixer and a feed-forward."""
    return [FULL if parts.mixer == ATTENTION else LINEAR for parts in config.layer_parts[::2]]


def read_step_limits(settings: Settings) -> dict[str, Any]:
    """Return the fields of ``time_step_limit``, a lower and an upper limit, by default 0 and infinity."""
    given = settings.values.get("time_step_limit")
    limits = [0.0, math.inf] if given is None else given
    if isinstance(limits, list):
        limits = [math.inf if limit == _INFINITY else limit for limit in limits]
    is_pair = isinstance(limits, list) and [type(limit) in (int, float) for limit in limits] == [True, True]
    if not is_pair or not 0 <= limits[0] < limits[1]:
        settings.refuse(f"time_step_limit is {given!r:.60}; two numbers of 0 or more are expected, the smaller first")
        return {}
    lower, upper = limits
    return {"mamba_dt_lower_limit": float(lower), "mamba_dt_upper_limit": None if math.isinf(upper) else float(upper)}


def written_step_limits(config: GPTConfig) -> dict[str, Any]:
    """Return ``time_step_limit`` of a model that has limits."""
    lower, upper = config.hybrid.mamba_dt_lower_limit, config.hybrid.mamba_dt_upper_limit
    return {"time_step_limit": [lower, math.inf if upper is None else upper]} if lower or upper is not None else {}


def mamba_links(config: GPTConfig, ours: str, theirs: str) -> Iterator[TensorLink]:
    """Yield the links of a Mamba-2 layer, whose tensors have the same names and rows as theirs."""
    hybrid, width = config.hybrid, config.hidden_size
    heads, states = hybrid.mamba_heads(width), hybrid.mamba_num_groups * hybrid.mamba_state_dim
    inner = heads * hybrid.mamba_head_dim
    rows, channels = 2 * inner + 2 * states + heads, inner + 2 * states
    shapes = {
        **{name: (heads,) for name in ("A_log", "D", "dt_bias")},
        "conv1d.weight": (channels, 1, hybrid.mamba_conv_kernel_dim),
        **({"conv1d.bias": (channels,)} if hybrid.mamba_conv_bias else {}),
        "in_proj.weight": (rows, width),
        **({} if hybrid.mamba_norm == "none" else {"norm.weight": (inner,)}),
        "out_proj.weight": (width, inner),
        **({"in_proj.bias": (rows,), "out_proj.bias": (width,)} if hybrid.mamba_proj_bias else {}),
    }
    for name, shape in shapes.items():
        yield whole(f"{ours}{name}", f"{theirs}{name}", shape)


class MambaDecoderFamily(RotaryDecoderFamily):
    """Base of architectures whose layers have Mamba-2 or attention, and then a feed-forward: two layers of ours.

    ``mamba_defaults`` are the defaults of the architecture's configuration class.
    """

    native_layers = 2
    norm_names = (("input_layernorm", "input_layernorm"), ("pre_mlp_layernorm", "pre_ff_layernorm"))
    mamba_defaults: Mapping[str, int] = MappingProxyType(
        {"mamba_n_heads": 128, "mamba_n_groups": 1, "mamba_d_state": 256, "mamba_d_conv": 4}
    )

    def layers_of(self, settings: Settings, mixers: str, feed_forward: str) -> dict[str, Any]:
        """Return the fields of layers with the given symbols, and of Mamba-2 if there are such layers."""
        pattern = "".join(f"{mixer}{feed_forward}" for mixer in mixers)
        fields = {"num_layers": len(pattern), "hybrid_override_pattern": pattern}
        return fields | (self.mamba_fields(settings) if set(mixers) != {"*"} else {})

    def inner_width(self, settings: Settings) -> int:
        """Return the width of all heads of Mamba-2 together."""
        return settings.integer("mamba_expand", 2) * settings.integer("hidden_size")

    def mamba_fields(self, settings: Settings) -> dict[str, Any]:
        sizes = {name: settings.integer(name, usual) for name, usual in self.mamba_defaults.items()}
        heads, inner = sizes["mamba_n_heads"], self.inner_width(settings)
        head_dim = settings.values.get("mamba_d_head", "auto")
        head_dim = inner // heads if head_dim == "auto" else settings.integer("mamba_d_head", inner // heads)
        if heads * head_dim != inner:
            settings.refuse(f"mamba_n_heads {heads} x mamba_d_head {head_dim} is not the width {inner} of Mamba-2")
        groups = sizes["mamba_n_groups"]
        if heads % groups:
            settings.refuse(f"mamba_n_heads {heads} is not divisible by mamba_n_groups {groups}")
        return {
            "mamba_num_heads": heads,
            "mamba_head_dim": max(head_dim, 1),
            "mamba_num_groups": groups,
            "mamba_state_dim": sizes["mamba_d_state"],
            "mamba_conv_kernel_dim": sizes["mamba_d_conv"],
            "mamba_conv_bias": settings.switch("mamba_conv_bias", True),
            "mamba_proj_bias": settings.switch("mamba_proj_bias", False),
            **read_step_limits(settings),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        hybrid = config.hybrid
        heads = hybrid.mamba_heads(config.hidden_size)
        return super().write_settings(config) | {
            "mamba_conv_bias": hybrid.mamba_conv_bias,
            "mamba_d_conv": hybrid.mamba_conv_kernel_dim,
            "mamba_d_head": hybrid.mamba_head_dim,
            "mamba_d_state": hybrid.mamba_state_dim,
            "mamba_expand": heads * hybrid.mamba_head_dim // config.hidden_size,
            "mamba_n_groups": hybrid.mamba_num_groups,
            "mamba_n_heads": heads,
            "mamba_proj_bias": hybrid.mamba_proj_bias,
            **written_step_limits(config),
        }

    def mixer_links(self, config: GPTConfig, ours: str, theirs: str, parts: LayerParts) -> Iterator[TensorLink]:
        """Yield the links of a layer's attention or Mamba-2."""
        if parts.mixer == MAMBA:
            yield from mamba_links(config, f"{ours}mixer.", f"{theirs}mamba.")
        else:
            yield from super().mixer_links(config, ours, theirs, parts)
