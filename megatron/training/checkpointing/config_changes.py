"""How the configuration of a checkpoint differs from the one of the run that loads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.config_base import field_specs
from megatron.training.config.run_config import config_parts


@dataclass(frozen=True)
class ConfigChange:
    """Hold one field (its path with dots) that differs."""

    field: str
    old: Any
    new: Any

    def __str__(self) -> str:
        """Return the change as the log shows it."""
        return f"{self.field}: {self.old} -> {self.new}"


@dataclass(frozen=True)
class ConfigChanges:
    """Split the differences by what a load does with them.

    It refuses those of ``shape``. It also refuses those of ``weights``, unless weights may be missing. All ``other``
    differences are logged.
    """

    shape: tuple[ConfigChange, ...]
    weights: tuple[ConfigChange, ...]
    other: tuple[ConfigChange, ...]


def compare_configs(old: Mapping[str, Any], new: Mapping[str, Any]) -> ConfigChanges:
    """Compare a checkpoint's configuration with the run's, both as nested dicts of plain values.

    The role of a field decides: one of the output is no change, nor is one that only one release of the program knows.
    A field shapes the model only where it counts, such as the number of positions where they are learned.
    """
    old_values, new_values = _flatten(old), _flatten(new)
    fields = {f"{part}.{spec.name}": spec.options for part, cls in config_parts().items() for spec in field_specs(cls)}
    changes: dict[str, list[ConfigChange]] = {"shape": [], "weights": [], "other": []}
    for field in sorted(old_values.keys() & new_values.keys()):
        section, _, _ = field.partition(".")
        before, after = old_values[field], new_values[field]
        role, where = (fields[field].role, fields[field].where) if field in fields else (None, None)
        if before == after or role == "output":
            continue
        counts = where is None or new_values.get(f"{section}.{where[0]}") == where[1]
        kind = role if role in ("shape", "weights") and counts else "other"
        changes[kind].append(ConfigChange(field, before, after))
    return ConfigChanges(**{kind: tuple(found) for kind, found in changes.items()})


def _flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            flat.update(_flatten(value, f"{prefix}{name}."))
        else:
            flat[prefix + name] = list(value) if isinstance(value, tuple) else value
    return flat
