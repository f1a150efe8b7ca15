"""What else a command line takes its values from."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class SourceConfig(Config, role="output"):
    """Name the files that give values where the command line gives none; they are part of the others' values then."""

    model_preset: str | None = flag(None, metavar="NAME")
    """Model whose shape is taken from a file of this project; --config and flags win over it."""
    config: tuple[str, ...] = flag((), append=True, metavar="FILE")
    """TOML or YAML file of flags and their values, or its URL, as --print-config writes it; may be repeated: later
    files win over earlier ones, and the command line over all."""
