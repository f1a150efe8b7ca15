"""Settings of attention whose heads have another shape in layers without a window."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.checkpoint.formats.huggingface.settings import Settings
from megatron.core.models.gpt import GPTConfig

_Shape = tuple[int, int]
"""Head dimension, and number of key-value heads."""
_WIDTH, _GROUPS = "head_dim", "num_key_value_heads"


def read_shapes(
    settings: Settings, has_window: Sequence[bool], usual: _Shape, default_global_width: int
) -> dict[str, Any]:
    """Return the fields of the shapes of attention; ``usual`` is the default of layers with a window.

    ``per_layer_config`` overrides the shape of any layer. Without this setting, ``global_head_dim`` is the dimension in
    layers without a window, and with ``attention_k_eq_v`` they have ``num_global_key_value_heads``.
    """
    usual = settings.integer(_WIDTH, usual[0]), settings.integer(_GROUPS, usual[1])
    shapes = list(_overridden(settings, len(has_window), usual))
    if "per_layer_config" not in settings.values:
        has_own = settings.switch("attention_k_eq_v", False)
        groups = settings.integer("num_global_key_value_heads", usual[1]) if has_own else usual[1]
        own = settings.integer("global_head_dim", default_global_width), groups
        shapes = [usual if has else own for has in has_window]
    found = {
        kind: {shape for shape, has in zip(shapes, has_window, strict=True) if has is kind} for kind in (True, False)
    }
    for kind, of_kind in found.items():
        if len(of_kind) > 1:
            layers = "with" if kind else "without"
            settings.refuse(f"per_layer_config has different shapes of attention in layers {layers} a window")
        for width, groups in of_kind:
            heads = settings.integer("num_attention_heads")
            if heads % groups or width % 2:
                settings.refuse(f"attention with {heads} heads of {width} channels in {groups} groups is not supported")
    ((width, groups), *_) = found[True] or found[False]
    ((own_width, own_groups), *_) = found[False] or found[True]
    fields: dict[str, Any] = {"kv_channels": width, "num_query_groups": groups}
    fields["group_query_attention"] = groups != settings.integer("num_attention_heads")
    return fields | {"global_kv_channels": own_width, "global_num_query_groups": own_groups}


def _overridden(settings: Settings, num_layers: int, usual: _Shape) -> Iterator[_Shape]:
    of_layers = settings.inner("per_layer_config")
    for layer in range(num_layers):
        own = None if of_layers is None else of_layers.inner(str(layer))
        if own is None:
            yield usual
            continue
        others = sorted(name for name, value in own.values.items() if name not in (_WIDTH, _GROUPS) and value)
        if others:
            own.refuse(f"{', '.join(others)}: only {_WIDTH} and {_GROUPS} may differ between layers")
        yield own.integer(_WIDTH, usual[0]), own.integer(_GROUPS, usual[1])


def written_shapes(config: GPTConfig) -> dict[str, Any]:
    """Return the settings of the shapes of attention, except the shape of layers with a window."""
    own = config.of_global_layers
    settings: dict[str, Any] = {"global_head_dim": own.kv_channels, "num_global_key_value_heads": own.num_query_groups}
    if own.num_query_groups != config.num_query_groups and not config.attention_k_eq_v:
        shape = {_WIDTH: own.kv_channels, _GROUPS: own.num_query_groups}
        numbers = (number for number, window in enumerate(config.layer_windows) if window is None)
        settings["per_layer_config"] = {str(number): shape for number in numbers}
    return settings
