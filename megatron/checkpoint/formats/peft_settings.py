"""Read the adapter settings of a peft folder. Importing this module imports no torch."""

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
"""Settings of peft of which only one value can be read; a setting that is left out has it."""


def base_of(folder: Path) -> Path:
    """Return the folder of the model that adapters name as theirs.

    Raises:
        CheckpointError: they name none on this machine.
    """
    named = read_settings(folder).get("base_model_name_or_path")
    if not named or not Path(named).is_dir():
        raise CheckpointError(
            f"{folder / ADAPTER_CONFIG}: base_model_name_or_path {named!r} is no folder here; name the folder of the "
            "model with --base-model of tools/checkpoint/convert.py"
        )
    return Path(named)


def read_settings(folder: Path) -> dict[str, Any]:
    """Return what adapter_config.json says.

    Raises:
        CheckpointError: it cannot be read, or asks for another kind of adapters.
    """
    path = folder / ADAPTER_CONFIG
    try:
        settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        problems = [
            f"{name} {settings[name]!r} (only {value!r} can be read)"
            for name, value in _EXPECTED.items()
            if settings.get(name, value) != value and settings.get(name) not in (None, [], {})
        ]
        problems += [f"{name} is missing" for name in ("r", "lora_alpha") if name not in settings]
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if problems:
        raise CheckpointError(f"{path}: {'; '.join(problems)}")
    return settings
