"""Mamba-2 layers: their settings and tensors, and layers that ours represent as a mixer and a feed-forward each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megatron.checkpoint.formats.huggingface.decoder_layers import FULL, RotaryDecoderFamily
from megatron.checkpoint.formats.huggingface.family import TensorLink, whole
from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig
from megatron.core.transformer import ATTENTION, ATTENTION_AND_MAMBA, MAMBA, LayerParts

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
    stacked = hybrid.projection_rows(MAMBA, width)
    inner, _, states, _, heads = stacked
    rows, channels = sum(stacked), inner + 2 * states
    shapes = {
        **dict.fromkeys(("A_log", "D", "dt_bias"), (heads,)),
        "conv1d.weight": (channels, 1, hybrid.mamba_conv_kernel_dim),
        **({"conv1d.bias": (channels,)} if hybrid.mamba_conv_bias else {}),
        "in_proj.weight": (rows, width),
        **({} if hybrid.mamba_norm == "none" else {"norm.weight": (inner,)}),
        "out_proj.weight": (width, inner),
        **({"in_proj.bias": (rows,), "out_proj.bias": (width,)} if hybrid.mamba_proj_bias else {}),
    }
    for name, shape in shapes.items():
        yield whole(f"{ours}{name}", f"{theirs}{name}", shape)


class MambaFamily(RotaryDecoderFamily):
    """Base of architectures with Mamba-2 layers.

    ``mamba_name`` is the name of such a layer's Mamba-2. ``mamba_sizes`` are the names of our sizes and their defaults,
    by their names. ``mamba_biases`` are the names of the switches for biases of the convolution and the projections.
    """

    mamba_name = "mamba"
    mamba_sizes: Mapping[str, tuple[str, int]] = MappingProxyType(
        {
            "mamba_n_heads": ("mamba_num_heads", 128),
            "mamba_n_groups": ("mamba_num_groups", 1),
            "mamba_d_state": ("mamba_state_dim", 256),
            "mamba_d_conv": ("mamba_conv_kernel_dim", 4),
        }
    )
    mamba_biases = ("mamba_conv_bias", "mamba_proj_bias")

    def mamba_fields(self, settings: Settings) -> dict[str, Any]:
        """Return the fields of Mamba-2; reject a number of groups that does not divide the heads."""
        fields: dict[str, Any] = {
            ours: settings.integer(name, usual) for name, (ours, usual) in self.mamba_sizes.items()
        }
        heads, groups = fields["mamba_num_heads"], fields["mamba_num_groups"]
        if heads % groups:
            names = {ours: name for name, (ours, _) in self.mamba_sizes.items()}
            dividend, divisor = names["mamba_num_heads"], names["mamba_num_groups"]
            settings.refuse(f"{dividend} {heads} is not divisible by {divisor} {groups}")
        of_convolution, of_projections = self.mamba_biases
        return fields | {
            "mamba_conv_bias": settings.switch(of_convolution, True),
            "mamba_proj_bias": settings.switch(of_projections, False),
        }

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        hybrid = replace(config.hybrid, mamba_num_heads=config.hybrid.mamba_heads(config.hidden_size))
        sizes = {name: getattr(hybrid, ours) for name, (ours, _) in self.mamba_sizes.items()}
        biases = dict(zip(self.mamba_biases, (hybrid.mamba_conv_bias, hybrid.mamba_proj_bias), strict=True))
        return super().write_settings(config) | sizes | biases

    def mixer_links(self, config: GPTConfig, ours: str, theirs: str, parts: LayerParts) -> Iterator[TensorLink]:
        """Yield the links of a layer's attention, Mamba-2, or both in parallel."""
        has_both = parts.mixer == ATTENTION_AND_MAMBA
        if parts.has_attention:
            yield from super().mixer_links(config, f"{ours}mixer." if has_both else ours, theirs, parts)
        if parts.mixer != ATTENTION:
            within = f"{ours}mixer.mamba." if has_both else f"{ours}mixer."
            yield from mamba_links(config, within, f"{theirs}{self.mamba_name}.")


class MambaDecoderFamily(MambaFamily):
    """Base of architectures whose layers have Mamba-2 or attention, or both, and then a feed-forward.

    Such a layer is two layers of ours.
    """

    native_layers = 2
    norm_names: tuple[tuple[str, str], ...] = (
        ("input_layernorm", "input_layernorm"),
        ("pre_mlp_layernorm", "pre_ff_layernorm"),
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
        """Return the fields of Mamba-2; reject heads that do not have the width of the layer together."""
        fields, inner = super().mamba_fields(settings), self.inner_width(settings)
        heads, head_dim = fields["mamba_num_heads"], settings.values.get("mamba_d_head", "auto")
        usual = max(inner // heads, 1)
        head_dim = usual if head_dim == "auto" else settings.integer("mamba_d_head", usual)
        if heads * head_dim != inner:
            settings.refuse(f"mamba_n_heads {heads} x mamba_d_head {head_dim} is not the width {inner} of Mamba-2")
        return fields | {"mamba_head_dim": head_dim, **read_step_limits(settings)}

    def write_settings(self, config: GPTConfig) -> dict[str, Any]:
        """Return the settings of a model."""
        inner = config.hybrid.inner_size(MAMBA, config.hidden_size)
        sizes = {"mamba_d_head": config.hybrid.mamba_head_dim, "mamba_expand": inner // config.hidden_size}
        return super().write_settings(config) | sizes | written_step_limits(config)
