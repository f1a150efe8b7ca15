"""Which layers of a Hugging Face model attend to a sliding window."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.core.models.gpt.gpt_config import GPTConfig
from megatron.core.transformer.layer_pattern import format_layer_pattern
from megatron.interop.huggingface.settings import Settings

FULL, SLIDING = "full_attention", "sliding_attention"


def read_layer_types(settings: Settings, default: Sequence[bool]) -> list[bool]:
    """Return for each layer whether ``layer_types`` gives it a window; ``default`` where there is none."""
    types = settings.values.get("layer_types")
    if types is None:
        return list(default)
    kinds = list(types) if isinstance(types, list) else [types]
    unknown = sorted({str(kind) for kind in kinds if kind not in (FULL, SLIDING)})
    if unknown:
        settings.refuse(f"layer_types has {', '.join(unknown)}; supported are {FULL} and {SLIDING}")
    elif len(kinds) != len(default):
        settings.refuse(f"layer_types has {len(kinds)} layers, but there are {len(default)}")
    else:
        return [kind == SLIDING for kind in kinds]
    return list(default)


def window_fields(settings: Settings, has_window: Sequence[bool], default: int | None) -> dict[str, Any]:
    """Return the fields of a GPTConfig in which these layers have the setting ``sliding_window``, with its default."""
    if not any(has_window):
        return {}
    window = settings.values.get("sliding_window", default)
    if type(window) is not int or window < 1:
        settings.refuse(f"sliding_window is {window!r}; its layers need a positive whole number")
        return {}
    pattern = None if all(has_window) else format_layer_pattern(has_window)
    return {"window_size": f"{window - 1},0", "window_attn_skip_freq": pattern}


def written_layer_types(config: GPTConfig) -> dict[str, Any]:
    """Return the settings ``sliding_window`` and ``layer_types`` of a model."""
    windows = config.layer_windows
    return {
        "sliding_window": next((window for window in windows if window is not None), None),
        "layer_types": [FULL if window is None else SLIDING for window in windows],
    }


def window_of_all_layers(config: GPTConfig) -> int | None:
    """Return the window that every layer has, or None where one has none."""
    windows = set(config.layer_windows)
    return windows.pop() if len(windows) == 1 else None
