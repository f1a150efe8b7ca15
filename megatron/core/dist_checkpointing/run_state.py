"""The plain values that a checkpoint holds beside its tensors, looked over before anybody takes them for a run's.

Importing this module imports no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing.index import INDEX_FILE
from megatron.core.errors import DamagedCheckpointError
from megatron.core.safe_io import is_plain_name

_LARGEST_COUNT = 1 << 63


def check_run_state(folder: Path, common: Mapping[str, Any]) -> None:
    """See that the shared state of a native checkpoint has the kinds of values that a run makes something of.

    Raises:
        DamagedCheckpointError: a value is missing or of another kind; it is named.
    """
    for name in ("progress", "config"):
        _expect(folder, name, common.get(name), isinstance(common.get(name), dict))
    for name in ("optimizer", "scheduler", "layout"):
        _expect(folder, name, common.get(name), isinstance(common.get(name), (dict, type(None))))
    model = common["config"].get("model")
    _expect(folder, "config.model", model, isinstance(model, (dict, type(None))))
    for name, value in common["progress"].items():
        is_history = name == "train_data"
        is_known = isinstance(value, (dict, type(None))) if is_history else _is_count(value, name)
        _expect(folder, f"progress.{name}", value, is_known)
    tokenizer = common.get("tokenizer")
    _expect(folder, "tokenizer", tokenizer, tokenizer is None or is_plain_name(tokenizer))


def _is_count(value: object, name: str) -> bool:
    if type(value) is float and name == "floating_point_operations_so_far":
        return math.isfinite(value) and value >= 0.0
    return type(value) is int and 0 <= value < _LARGEST_COUNT


def _expect(folder: Path, name: str, value: object, is_met: bool) -> None:
    if not is_met:
        text = repr(value)
        raise DamagedCheckpointError(
            f"{folder / INDEX_FILE}: {name} is {text if len(text) <= 80 else text[:77] + '...'}, which no run records"
        )
