"""Read the adapter settings of a PEFT folder. Importing this module does not import torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.errors import CheckpointError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"

_EXPECTED: Mapping[str, Any] = {
    "peft_type": "LORA",
    "bias": "none",
    "use_dora": False,
    "use_rslora": False,
    "rank_pattern": {},
    "alpha_pattern": {},
    "modules_to_save": None,
    "layer_replication": None,
    "trainable_token_indices": None,
}
"""PEFT settings with only one supported value, which is also the value of an absent setting."""


def base_of(folder: Path) -> Path:
    """Return the base model's folder named in an adapter's settings.

    Raises:
        CheckpointError: no such folder is available on this host.
    """
    named = read_settings(folder).get("base_model_name_or_path")
    if not named or not Path(named).is_dir():
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path {named!r} is not a folder on this host; pass the "
            "folder of the model with --base-model of megatron convert"
        )
    return Path(named)


def read_settings(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json.

    Raises:
        CheckpointError: the file cannot be read, or describes an unsupported kind of adapters.
    """
    path = folder / ADAPTER_CONFIG
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        problems = [
            f"{name} {settings[name]!r} (only {value!r} is supported)"
            for name, value in _EXPECTED.items()
            if settings.get(name, value) != value and settings.get(name) not in (None, [], {})
        ]
        problems += [f"{name} is missing" for name in ("r", "lora_alpha") if name not in settings]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    return settings
