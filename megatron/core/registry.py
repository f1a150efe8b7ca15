"""Registry of the activations, norms, optimizers, … that scripts add under names of their own.

A configuration field lists its kind in ``registry`` (see `megatron.core.config_base.FlagOptions`), and accepts the
registered names of this kind like its choices. The functions that users call are in `megatron.training.extending`.
Importing this module does not import torch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from megatron.core.errors import ConfigurationError, choices

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")


@dataclass(frozen=True)
class Registered:
    """A registered function or class, and the properties that were passed with it."""

    value: Any
    properties: dict[str, Any]


_REGISTERED: dict[str, dict[str, Registered]] = {}
_SCRIPTS: list[str] = []


def add_script(path: str) -> None:
    """Record a script that registers something, by its absolute path."""
    if path not in _SCRIPTS:
        _SCRIPTS.append(path)


def registered_scripts() -> tuple[str, ...]:
    """Return the scripts that registered something, which other processes import to have the same names."""
    return tuple(_SCRIPTS)


def add_registered(kind: str, name: str, value: Any, built_in: tuple[str, ...] = (), **properties: Any) -> None:
    """Register a function or class under a name of its kind.

    Args:
        kind: the kind, as messages name it: ``activation``.
        name: the name, which is a value of the kind's flag.
        value: the function or class.
        built_in: the names of this kind that exist without registration.
        properties: anything else that the kind needs to know.

    Raises:
        ConfigurationError: the name exists or cannot be a flag's value, or the value cannot be called.
    """
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise ConfigurationError(f"{kind} {name!r}: a name of letters, digits, '_', '-' and '.' is expected")
    if name in built_in or name in _REGISTERED.get(kind, ()):
        origin = "built in" if name in built_in else "already registered"
        raise ConfigurationError(f"{kind} {name} is {origin}; register yours under another name")
    if not callable(value):
        raise ConfigurationError(f"{kind} {name}: a function or class is expected, not {value!r}")
    _REGISTERED.setdefault(kind, {})[name] = Registered(value, properties)


def registered_names(kind: str) -> tuple[str, ...]:
    """Return the registered names of a kind, in the order of registration."""
    return tuple(_REGISTERED.get(kind, ()))


def find_registered(kind: str, name: str) -> Registered:
    """Return what was registered under a name.

    Raises:
        ConfigurationError: nothing was; the message says how to register it.
    """
    try:
        return _REGISTERED[kind][name]
    except KeyError:
        raise ConfigurationError(missing_registration(kind, name)) from None


def is_registered(kind: str, name: str | None) -> bool:
    """Return whether a name of this kind was registered, rather than built in or absent."""
    return name in _REGISTERED.get(kind, ())


def missing_registration(kind: str, name: str) -> str:
    """Return the error message for a name that is neither built in nor registered."""
    known = f" (registered: {choices(registered_names(kind))})" if registered_names(kind) else ""
    return (
        f"{kind} {name} is not registered{known}; pass the script that registers it with --script FILE, or run that "
        "script instead of pretrain_gpt.py"
    )
