"""Settings files of other trainers: which trainer's, and the launch that stands for one."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron.adoption.trainers.nanotron import nanotron_settings
from megatron.adoption.trainers.olmo_core import olmo_core_settings
from megatron.adoption.trainers.settings import AdoptedSettings
from megatron.adoption.trainers.torchtitan import torchtitan_settings
from megatron.core.errors import ConfigurationError


@dataclasses.dataclass(frozen=True)
class _Trainer:
    name: str
    sections: frozenset[str]
    variable: str | None
    adopt: Callable[[Mapping[str, Any], Mapping[str, str]], AdoptedSettings]


_TRAINERS = {
    ".toml": _Trainer("torchtitan", frozenset(("model", "training")), "NGPU", torchtitan_settings),
    ".yaml": _Trainer("nanotron", frozenset(("model", "parallelism", "tokens")), None, nanotron_settings),
    ".yml": _Trainer("nanotron", frozenset(("model", "parallelism", "tokens")), None, nanotron_settings),
    ".json": _Trainer("OLMo-core", frozenset(("model", "train_module", "trainer")), "WORLD_SIZE", olmo_core_settings),
}


def read_settings(path: Path, text: str, variables: Mapping[str, str]) -> AdoptedSettings:
    """Read a settings file; its suffix says whose it is.

    Raises:
        ConfigurationError: it cannot be parsed, sections that this trainer's files have are missing, or a variable is
            none of this trainer's.
    """
    trainer = _TRAINERS[path.suffix]
    unused = [f"{name}={value}" for name, value in variables.items() if name != trainer.variable]
    if unused:
        known = f"{trainer.variable} alone can be set" if trainer.variable else "nothing can be set"
        raise ConfigurationError(f"--set {unused[0]}: for a settings file of {trainer.name} {known}; leave it out")
    try:
        settings = _parse(path, text)
    except ValueError as error:
        raise ConfigurationError(f"{path} cannot be parsed: {' '.join(str(error).split())}") from None
    missing = sorted(trainer.sections - set(settings)) if isinstance(settings, dict) else sorted(trainer.sections)
    if missing:
        raise ConfigurationError(
            f"{path} is no settings file of {trainer.name}: it has no section {' and no '.join(missing)}"
        )
    try:
        return trainer.adopt(settings, variables)
    except (TypeError, ValueError, LookupError, ArithmeticError) as error:
        raise ConfigurationError(f"{path} has a value that {trainer.name} has not at its place: {error}") from None


def _parse(path: Path, text: str) -> Any:
    if path.suffix == ".json":
        return json.loads(text)
    if path.suffix == ".toml":
        return _parse_toml(text)
    return _parse_yaml(text)


def _parse_toml(text: str) -> Any:
    try:
        if sys.version_info >= (3, 11):
            import tomllib
        else:
            import tomli as tomllib
    except ImportError:
        raise ConfigurationError("reading TOML with Python 3.10 needs tomli: pip install tomli") from None
    return tomllib.loads(text)


def _parse_yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigurationError("reading YAML needs PyYAML: pip install pyyaml") from None
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from None
