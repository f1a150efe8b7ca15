"""Arguments that a script adds to the command line, as Megatron's ``extra_args_provider`` does, and its defaults.

The process has one command line, so the script's arguments are declared once and become the part ``extra`` of every
configuration. Importing this module does not import torch.
"""

from __future__ import annotations

import argparse
import dataclasses
import keyword
from collections.abc import Callable, Collection, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from megatron.core.config_base import Config, FieldSpec, field_specs, flag
from megatron.core.errors import ConfigurationError

ExtraArgsProvider = Callable[[argparse.ArgumentParser], Any]
"""Adds arguments to a parser with ``add_argument``; what it returns is ignored."""

_TYPES: Mapping[Any, type] = MappingProxyType({None: str, str: str, int: int, float: float})
_STORED = (argparse._StoreAction, argparse._AppendAction)
_SWITCHES = (argparse._StoreTrueAction, argparse._StoreFalseAction)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExtraArguments(Config, role="run"):
    """Values of the arguments that the script added, by name; there are none unless `declare_arguments` was called."""

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...


class _Declared:
    arguments: ClassVar[type[ExtraArguments]] = ExtraArguments
    defaults: ClassVar[Mapping[str, Any]] = MappingProxyType({})


def extra_class() -> type[ExtraArguments]:
    """Return the class of the arguments that the script added."""
    return _Declared.arguments


def script_defaults() -> Mapping[str, Any]:
    """Return the script's own defaults of flags, by field name."""
    return _Declared.defaults


def declare_arguments(provider: ExtraArgsProvider | None, defaults: Mapping[str, Any], known: Collection[str]) -> None:
    """Add a script's arguments to the command lines of this process, and set its defaults of flags.

    Args:
        provider: adds the arguments to a parser, or None if there are none.
        defaults: values of flags, also of added ones, by field name; the command line, presets and files override them.
        known: the flags that exist without the script.

    Raises:
        ConfigurationError: an argument exists already, or is of a kind that a checkpoint cannot record.
    """
    _Declared.arguments = ExtraArguments if provider is None else _as_class(provider, known)
    _Declared.defaults = MappingProxyType(dict(defaults))


def recorded_arguments(values: Mapping[str, Any]) -> ExtraArguments:
    """Return recorded arguments of a script, whether or not this process has declared them."""
    if not values:
        return ExtraArguments()
    fields: list[Any] = []
    for name, value in values.items():
        given = tuple(value) if isinstance(value, list) else value
        fields.append((name, Any, flag(given, role="run", cli=False)))
    made = dataclasses.make_dataclass(
        ExtraArguments.__name__, fields, bases=(ExtraArguments,), frozen=True, kw_only=True
    )
    recorded: ExtraArguments = made()
    return recorded


def _as_class(provider: ExtraArgsProvider, known: Collection[str]) -> type[ExtraArguments]:
    """Return a configuration class with a field for each argument that the provider adds."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    try:
        provider(parser)
    except argparse.ArgumentError as error:
        raise ConfigurationError(f"extra_args: {error}") from error
    problems: list[str] = []
    fields = {}
    docs = {}
    for action in parser._actions:
        problem = _problem(action, known)
        if problem is not None:
            problems.append(f"extra_args: {'/'.join(action.option_strings) or action.dest}: {problem}")
            continue
        fields[action.dest] = _field(action)
        text = (action.help or "").replace("%(default)s", str(action.default)).replace("%%", "%").strip()
        docs[action.dest] = f" Off: {text}" if _is_negative(action) else text
    if parser._mutually_exclusive_groups:
        problems.append("extra_args: mutually exclusive groups are not supported; check the values in the script")
    if unknown := parser._defaults.keys() - {action.dest for action in parser._actions}:
        names = ", ".join(sorted(unknown))
        problems.append(f"extra_args: set_defaults: {names} is not a flag that the script adds; use args_defaults")
    if problems:
        raise ConfigurationError(problems)
    made = dataclasses.make_dataclass(
        ExtraArguments.__name__,
        [(name, *of_field) for name, of_field in fields.items()],
        bases=(ExtraArguments,),
        namespace={"docs_of_fields": docs},
        frozen=True,
        kw_only=True,
    )
    field_specs(made)  # raises for a type that a field cannot have
    return made


def _is_negative(action: argparse.Action) -> bool:
    return isinstance(action, argparse._StoreFalseAction)


def _problem(action: argparse.Action, known: Collection[str]) -> str | None:
    """Return why an argument cannot be added, or None."""
    primary = "--" + action.dest.replace("_", "-")
    if not action.option_strings:
        return "a flag is expected, such as --my-flag; positional arguments are not supported"
    if taken := [name for name in dict.fromkeys((*action.option_strings, primary)) if name in known]:
        return f"{', '.join(taken)} exists already; use another name"
    if not all(name.startswith("--") for name in action.option_strings):
        return "a name that starts with -- is expected"
    if not action.dest.isidentifier() or keyword.iskeyword(action.dest):
        return f"{action.dest} is not a Python name; pass dest"
    if isinstance(action, _SWITCHES):
        wanted = _is_negative(action)
        return None if action.default is wanted else f"its default is {action.default}; {wanted} is expected"
    if not isinstance(action, _STORED):
        return "only the actions store, store_true, store_false and append are supported"
    if action.type not in _TYPES:
        name = getattr(action.type, "__name__", str(action.type))
        return f"type={name} is not supported; use int, float, str or store_true, and convert the value in the script"
    if action.nargs is not None and (isinstance(action, argparse._AppendAction) or action.nargs == argparse.OPTIONAL):
        return f"nargs={action.nargs} is not supported; use nargs='+' or a number with the action store"
    item = _TYPES[action.type]
    values = action.default if isinstance(action.default, (list, tuple)) else [action.default]
    accepted = (int, float) if item is float else (item,)
    if wrong := [value for value in values if value is not None and type(value) not in accepted]:
        return f"its default {wrong[0]!r} is not a value of type {item.__name__}"
    return None


def _field(action: argparse.Action) -> tuple[Any, Any]:
    """Return the type and the field of an argument without problems."""
    primary = "--" + action.dest.replace("_", "-")
    if isinstance(action, _SWITCHES):
        negative = action.option_strings[0] if _is_negative(action) else None
        aliases = tuple(name for name in action.option_strings if name not in (negative or primary,))
        return bool, flag(action.default, role="run", aliases=aliases, negative=negative, in_args=True)
    item, default = _TYPES[action.type], action.default
    choices = None if action.choices is None else tuple(str(choice) for choice in action.choices)
    aliases = tuple(name for name in action.option_strings if name != primary)
    options: dict[str, Any] = {"role": "run", "aliases": aliases, "choices": choices, "in_args": True}
    if isinstance(action.metavar, str):
        options["metavar"] = action.metavar
    is_append = isinstance(action, argparse._AppendAction)
    if is_append or action.nargs is not None:
        nargs = None if is_append else "+" if action.nargs == argparse.ZERO_OR_MORE else action.nargs
        default = dataclasses.MISSING if action.required else tuple(default or ())
        return tuple[item, ...], flag(default, append=is_append, nargs=nargs, **options)  # type: ignore[valid-type]
    if item is float and type(default) is int:
        default = float(default)
    if action.required:
        return item, flag(**options)
    return (item | None if default is None else item), flag(default, **options)


def extra_fields() -> tuple[FieldSpec, ...]:
    """Return the fields of the arguments that the script added."""
    added: type = extra_class()
    return field_specs(added)
