"""Frozen dataclasses whose fields are command-line flags: field metadata, documentation and JSON round trip.

A configuration class may nest groups of fields (`group`), which code reads as ``config.moe.num_experts``. Flags, files
and messages use the name of the field alone, ``num_experts``: `field_specs`, `field_docs`, `config_to_dict` and
`config_from_dict` list the fields of groups like all others, and `field_value`, `with_fields` and `from_fields` read
and set them by name.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar

from megatron.core.errors import ConfigurationError
from megatron.core.registry import missing_registration, registered_names

ConfigType = TypeVar("ConfigType")

_METADATA_KEY = "flag"
_GROUP_KEY = "group"

Role = Literal["weights", "shape", "meaning", "recipe", "layout", "run", "session", "output"]
"""Role of a field, which decides how a configuration is compared, recorded and restored.

``weights`` determines only which weights exist, ``shape`` also how they are interpreted, and ``meaning`` what is
computed from the same weights. ``recipe`` describes how a model is trained and is kept from run to run. ``layout``
distributes the work over processes. ``session`` ends one session of a run early, and a later session does not take it
over. ``run`` is any other behavior of a run, and ``output`` is where files are written and what is reported.
"""
IDENTITY: tuple[Role, ...] = ("weights", "shape", "meaning")
"""The roles that together identify a model."""

_MOST_OF_A_SIZE = 2**24
_LARGEST_INTEGER = 2**63 - 1


@dataclasses.dataclass(frozen=True)
class Bounds:
    """Range check of a numeric field, with its description for messages."""

    words: str
    hold: Callable[[float], bool]


POSITIVE = Bounds("greater than 0", lambda value: value > 0)
NOT_NEGATIVE = Bounds("of 0 or more", lambda value: value >= 0)
FRACTION = Bounds("from 0 to 1", lambda value: 0 <= value <= 1)
BELOW_ONE = Bounds("from 0 to below 1", lambda value: 0 <= value < 1)


@dataclasses.dataclass(frozen=True)
class Idle:
    """A condition under which a field has no effect, see `idle_with` and `idle_without`."""

    names: tuple[str, ...]
    value: Any
    is_with: bool
    because: str = ""

    def reason(self, others: Sequence[tuple[FieldSpec, Any]]) -> str | None:
        """Return the text that completes "has no effect", or None if the condition does not hold.

        ``others`` are the named fields, each with its value.
        """
        held = [found == self.value if self.value is not None else found != spec.default for spec, found in others]
        if any(held) != self.is_with:
            return None
        *most, last = [self._named(spec) for spec, _ in others]
        flags = f"{', '.join(most)} or {last}" if most else last
        return f"{'with' if self.is_with else 'without'} {flags}{self.because}"

    def _named(self, spec: FieldSpec) -> str:
        if self.value is not None:
            return spec.typed(self.value)
        return spec.flags[0] if self.is_with or spec.is_bool else spec.typed(spec.metavar)


def idle_with(name: str, value: Any = None, *, because: str = "") -> Idle:
    """Declare that a field has no effect if the field ``name`` has this value, or, for None, if it is set."""
    return Idle((name,), value, True, because)


def idle_without(*names: str, value: Any = None) -> Idle:
    """Declare that a field has no effect if none of ``names`` has this value, or, for None, if none is set."""
    return Idle(names, value, False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlagOptions:
    """Metadata of a field that does not follow from its name.

    On the command line: ``aliases`` are additional names. ``negative`` is the flag that turns a default-True field off.
    ``deprecated`` are names of an earlier release, which are accepted with a warning and hidden from the help, and
    ``deprecated_values`` are (earlier, current) names of choices. Stored configurations may contain both. ``append``
    collects the values of every occurrence. ``cli=False`` marks a field without a flag. ``not_built`` are choices of
    Megatron-LM that this project does not implement. The names that scripts register under the kind ``registry`` (see
    `megatron.core.registry`) are accepted like ``choices``.

    ``most`` is the largest accepted integer, and its negative is the smallest: a larger number would only waste memory
    and time before it is rejected. The default is 2^24 for sizes of a model or its layout, far above any real size, and
    otherwise the range of 64 bits.

    Relations between fields, by name: a field ``excludes`` others, and setting it without the field that it ``needs``
    (or any of several) is an error. It counts only if ``where`` holds, that is, if another field has the given value;
    otherwise the value in a checkpoint is not compared. If ``idle`` holds, the field has no effect and a note says so.
    ``seen_as`` names the attribute of the configuration that several flags set.

    ``in_args`` are the field's names in the ``args`` of Megatron-LM checkpoints: the first name that exists is read,
    and all are written. True stands for the field's own name, and None for the default of its class.

    Fields are listed in the order of their declaration, except that groups, and fields with ``listed_first``, precede
    inherited fields.
    """

    role: Role | None = None
    aliases: tuple[str, ...] = ()
    deprecated: tuple[str, ...] = ()
    deprecated_values: tuple[tuple[str, str], ...] = ()
    negative: str | None = None
    choices: tuple[str, ...] | None = None
    not_built: tuple[str, ...] = ()
    registry: str | None = None
    bounds: Bounds | None = None
    most: int | None = None
    nargs: str | int | None = None
    metavar: str | None = None
    append: bool = False
    cli: bool = True
    excludes: tuple[str, ...] = ()
    needs: str | tuple[str, ...] | None = None
    where: tuple[str, Any] | None = None
    idle: Idle | None = None
    seen_as: str | None = None
    in_args: tuple[str, ...] | bool | None = None
    listed_first: bool = False


def flag(default: Any = dataclasses.MISSING, **options: Any) -> Any:
    """Declare a configuration field with its default, if it has one, and its `FlagOptions`."""
    return dataclasses.field(default=default, metadata={_METADATA_KEY: FlagOptions(**options)})


def group(kind: type[Any]) -> Any:
    """Declare a group of fields: a nested configuration whose fields are listed as those of the class that has it.

    Args:
        kind: the class of the group. Each of its fields has a default, and none is a group.
    """
    return dataclasses.field(default=kind(), metadata={_GROUP_KEY: kind})


class Config:
    """Base of all configuration classes whose fields are flags; it checks that every field has a role.

    A class may set the ``role`` and ``in_args`` of the fields that do not set their own. ``retired`` are fields of
    earlier releases, which stored configurations may still contain.

    Raises:
        TypeError: a field has no role, or an unknown role.
    """

    retired: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(
        cls, *, role: Role | None = None, in_args: bool = False, retired: tuple[str, ...] = ()
    ) -> None:
        """Complete the options of the fields that the class itself declares, not of inherited fields."""
        cls.retired = retired
        for name in inspect.get_annotations(cls):
            declared = cls.__dict__.get(name, dataclasses.MISSING)
            field = declared if isinstance(declared, dataclasses.Field) else flag(declared)
            if _GROUP_KEY in field.metadata:
                continue
            options: FlagOptions = field.metadata.get(_METADATA_KEY, FlagOptions())
            own_role, names = options.role or role, in_args if options.in_args is None else options.in_args
            if own_role not in typing.get_args(Role):
                roles = ", ".join(typing.get_args(Role))
                raise TypeError(
                    f"{cls.__name__}.{name} has the role {own_role}; declare it as flag(..., role=R), with R of {roles}"
                )
            names = ((name,) if names else ()) if isinstance(names, bool) else names
            options = dataclasses.replace(options, role=own_role, in_args=names)
            setattr(cls, name, dataclasses.field(default=field.default, metadata={_METADATA_KEY: options}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """Complete description of one configuration field, as a parser or a documentation page needs it."""

    name: str
    owner: str
    item_type: type
    is_optional: bool
    is_sequence: bool
    is_required: bool
    default: Any
    options: FlagOptions

    @property
    def is_bool(self) -> bool:
        return self.item_type is bool and not self.is_sequence

    @property
    def most(self) -> int:
        """Return the largest integer that the field accepts."""
        if self.options.most is not None:
            return self.options.most
        return _MOST_OF_A_SIZE if self.options.role in ("weights", "shape", "layout") else _LARGEST_INTEGER

    def excess(self, value: Any) -> str | None:
        """Return an error message if a number is too large for the field, or None."""
        if type(value) is not int or abs(value) <= self.most:
            return None
        digits = str(value) if abs(value) < 10**20 else f"{float(value):.3g}" if abs(value) < 10**300 else "the number"
        return f"{digits}: a number of at most {self.most} is expected"

    @property
    def flags(self) -> tuple[str, ...]:
        """Return the command-line names of the field, the primary name first; empty if no flag sets it."""
        if not self.options.cli:
            return ()
        if self.options.negative is not None:
            return (self.options.negative, *self.options.aliases)
        return ("--" + self.name.replace("_", "-"), *self.options.aliases)

    def converted(self, text: str) -> Any:
        """Convert a word to the type of an item; if the default of a float field is an integer, whole numbers are too.

        Raises:
            ValueError: the text is not of this type.
        """
        value = self.item_type(text)
        is_whole = self.item_type is float and type(self.default) is int and value.is_integer()
        return int(value) if is_whole else value

    @property
    def choices(self) -> tuple[str, ...] | None:
        """Return the accepted values, built in and registered, or None if any value of the type is accepted."""
        if self.options.registry is None:
            return self.options.choices
        return (*(self.options.choices or ()), *registered_names(self.options.registry))

    def unregistered(self, value: Any) -> str | None:
        """Return an error message if the value is a name that must be registered and is not, or None."""
        kind = self.options.registry
        if kind is None or value is None:
            return None
        unknown = [name for name in (value if self.is_sequence else (value,)) if name not in (self.choices or ())]
        return missing_registration(kind, unknown[0]) if unknown else None

    @property
    def metavar(self) -> str:
        """Return the placeholder of the value in a line of help; switches have none."""
        if self.choices:
            return "{" + ",".join(self.choices) + "}"
        return self.options.metavar or {int: "N", float: "X", str: "TEXT"}[self.item_type]

    def help_text(self, doc: str) -> str:
        """Return the help text from the field's documentation: for a negative flag, the text after "Off:"."""
        if self.options.negative is None:
            return doc
        text = doc.partition(" Off: ")[2]
        return text[:1].upper() + text[1:]

    def typed(self, value: Any) -> str:
        """Return the flag and its value as typed on the command line; a switch has no value."""
        return self.flags[0] if self.is_bool else f"{self.flags[0]} {value}"


def _item_type(annotation: Any) -> tuple[type, bool, bool]:
    """Split an annotation into (element type, may be None, is a tuple)."""
    is_optional = False
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        members = [member for member in typing.get_args(annotation) if member is not type(None)]
        is_optional = len(members) < len(typing.get_args(annotation))
        assert len(members) == 1, f"a field may be X or X | None, not {annotation}"
        annotation = members[0]
    is_sequence = typing.get_origin(annotation) is tuple
    if is_sequence:
        annotation = typing.get_args(annotation)[0]
    assert annotation in (bool, int, float, str), f"a field cannot have the type {annotation}"
    return annotation, is_optional, is_sequence


def _fields_in_order(config_class: type) -> list[dataclasses.Field[Any]]:
    """Return the fields and groups of a configuration class in the order in which they are listed."""

    def is_listed_later(field: dataclasses.Field[Any]) -> bool:
        options: FlagOptions = field.metadata.get(_METADATA_KEY, FlagOptions())
        return _GROUP_KEY not in field.metadata and not options.listed_first

    return sorted(dataclasses.fields(config_class), key=is_listed_later)


def _flat_fields(config_class: type) -> Iterator[tuple[type, dataclasses.Field[Any]]]:
    """Yield every field with the class that has it, the class itself or a group, in the order of the list."""
    for field in _fields_in_order(config_class):
        if _GROUP_KEY in field.metadata:
            yield from _flat_fields(field.metadata[_GROUP_KEY])
        else:
            yield config_class, field


def _flat_hints(config_class: type) -> dict[str, Any]:
    """Return the type of every field, by name."""
    hints = typing.get_type_hints(config_class)
    for kind in {owner for owner, _ in _flat_fields(config_class)} - {config_class}:
        hints |= typing.get_type_hints(kind)
    return hints


@functools.cache
def _group_names(config_class: type) -> Mapping[str, str]:
    """Return the name of the group of each field that is in a group, by the name of the field."""
    return {
        inner.name: outer.name
        for outer in dataclasses.fields(config_class)
        if _GROUP_KEY in outer.metadata
        for inner in dataclasses.fields(outer.metadata[_GROUP_KEY])
    }


@functools.cache
def field_specs(config_class: type) -> tuple[FieldSpec, ...]:
    """Return the description of every field of a configuration class, inherited ones first.

    The fields of a group are listed at its place, see `FlagOptions` for the order.
    """
    hints = _flat_hints(config_class)
    specs = []
    for owner, field in _flat_fields(config_class):
        item_type, is_optional, is_sequence = _item_type(hints[field.name])
        options: FlagOptions = field.metadata[_METADATA_KEY]
        is_required = field.default is dataclasses.MISSING
        if options.cli and item_type is bool and not is_sequence:
            assert (field.default is True) == (options.negative is not None), (
                f"{field.name}: a default-True field, and no other, needs a negative flag"
            )
        specs.append(
            FieldSpec(
                name=field.name,
                owner=_owner(owner, field.name),
                item_type=item_type,
                is_optional=is_optional,
                is_sequence=is_sequence,
                is_required=is_required,
                default=None if is_required else field.default,
                options=options,
            )
        )
    return tuple(specs)


def field_value(config: Any, name: str) -> Any:
    """Return the value of a field, in a group or not, by its name.

    Args:
        config: the configuration.
        name: the field, or any other attribute of the configuration.

    Raises:
        AttributeError: there is no such field or attribute.
    """
    config_class: type = type(config)
    group_name = _group_names(config_class).get(name)
    return getattr(config if group_name is None else getattr(config, group_name), name)


def with_fields(config: ConfigType, **changes: Any) -> ConfigType:
    """Return a copy of a configuration with other values in some fields, like `dataclasses.replace`.

    Args:
        config: the configuration, which stays as it is.
        changes: the new values by the names of the fields, in groups or not.

    Raises:
        TypeError: there is no such field.
    """
    plain, of_groups = _by_group(type(config), changes)
    groups = {name: dataclasses.replace(getattr(config, name), **values) for name, values in of_groups.items()}
    return dataclasses.replace(config, **plain, **groups)  # type: ignore[type-var]


def from_fields(config_class: type[ConfigType], **values: Any) -> ConfigType:
    """Build a configuration from field values; fields of groups may be passed directly.

    Args:
        config_class: the class of the configuration.
        values: the values by the names of the fields; each absent field takes its default.

    Raises:
        TypeError: there is no such field, or a required one is missing.
    """
    plain, of_groups = _by_group(config_class, values)
    groups = {name: type(getattr(config_class, name))(**given) for name, given in of_groups.items()}
    return config_class(**plain, **groups)


def _by_group(config_class: type, values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Split values by field into those of fields in no group, and those of each group by its name."""
    names = _group_names(config_class)
    plain: dict[str, Any] = {}
    of_groups: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        given = of_groups.setdefault(names[name], {}) if name in names else plain
        given[name] = value
    return plain, of_groups


def _owner(config_class: type, name: str) -> str:
    """Return the name of the class that declares a field."""
    for ancestor in config_class.__mro__:
        if name in inspect.get_annotations(ancestor):
            return ancestor.__name__
    raise AssertionError(f"{config_class.__name__} has no field {name}")


@functools.cache
def field_docs(config_class: type) -> Mapping[str, str]:
    """Return the string literal below each field, by field name, including inherited fields.

    The text is read from the source, so that it works under ``python -OO`` too.
    """
    docs: dict[str, str] = {}
    for ancestor in reversed(config_class.__mro__):
        if dataclasses.is_dataclass(ancestor):
            docs.update(_class_docs(ancestor))
            for field in dataclasses.fields(ancestor):
                if _GROUP_KEY in field.metadata:
                    docs.update(field_docs(field.metadata[_GROUP_KEY]))
    return docs


def _class_docs(config_class: type) -> dict[str, str]:
    if "docs_of_fields" in vars(config_class):  # a class without source
        return dict(vars(config_class)["docs_of_fields"])
    source_file = sys.modules[config_class.__module__].__file__
    assert source_file is not None
    tree = ast.parse(Path(source_file).read_text(encoding="utf-8"))
    docs: dict[str, str] = {}
    for node in tree.body:
        if not isinstance(node, ast.ClassDef) or node.name != config_class.__name__:
            continue
        for statement, following in zip(node.body, node.body[1:]):
            if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
                continue
            if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
                docs[statement.target.id] = " ".join(str(following.value.value).split())
    return docs


def config_to_dict(config: Any) -> dict[str, Any]:
    """Turn a configuration (nested dataclasses of plain values) into JSON-ready dicts and lists.

    A dataclass becomes a dictionary of its own, except that the fields of a group are among those of its class.
    """
    result: dict[str, Any] = {}
    for field in _fields_in_order(type(config)):
        value = getattr(config, field.name)
        if _GROUP_KEY in field.metadata:
            result |= config_to_dict(value)
        elif dataclasses.is_dataclass(value):
            result[field.name] = config_to_dict(value)
        else:
            result[field.name] = list(value) if isinstance(value, tuple) else value
    return result


def config_from_dict(config_class: type[ConfigType], values: Mapping[str, Any]) -> ConfigType:
    """Build a configuration from what `config_to_dict` returned.

    Strict: an unknown key, a missing required key and a value of the wrong type are errors. An absent key takes its
    default, so that dictionaries written before a field existed can still be read. A retired key is ignored.
    Deprecated names of fields and choices are replaced by the current ones.

    Raises:
        ConfigurationError: lists every problem found.
    """
    problems: list[str] = []
    config = _build(config_class, values, config_class.__name__, problems)
    if problems or config is None:
        raise ConfigurationError(problems)
    return config


def with_current_names(config_class: type, values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Replace deprecated names of fields and of choices in the stored values of a configuration class."""
    has_flags = issubclass(config_class, Config)
    specs = {spec.name: spec.options for spec in field_specs(config_class)} if has_flags else {}
    fields = {flag_name: name for name, options in specs.items() for flag_name in options.deprecated}
    fields = {flag_name.lstrip("-").replace("-", "_"): name for flag_name, name in fields.items()}
    renamed = {name if fields.get(name) in values else fields.get(name, name): value for name, value in values.items()}
    for name, options in specs.items():
        for earlier, current in options.deprecated_values:
            if renamed.get(name) == earlier:
                renamed[name] = current
    return renamed


def _build(config_class: type[ConfigType], values: object, where: str, problems: list[str]) -> ConfigType | None:
    if not isinstance(values, Mapping):
        problems.append(f"{where}: {values!r} is not an object")
        return None
    values = with_current_names(config_class, values)
    hints = _flat_hints(config_class)
    fields = {field.name: field for _, field in _flat_fields(config_class)}
    retired = config_class.retired if issubclass(config_class, Config) else ()
    before = len(problems)
    problems.extend(f"{where}: unknown field {name}" for name in values if name not in {*fields, *retired})
    arguments: dict[str, Any] = {}
    for name, field in fields.items():
        if name not in values:
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
                problems.append(f"{where}: field {name} is missing")
        elif dataclasses.is_dataclass(hints[name]):
            nested = _build(typing.cast("type[Any]", hints[name]), values[name], f"{where}.{name}", problems)
            arguments[name] = nested
        else:
            arguments[name] = _plain_value(hints[name], values[name], f"{where}.{name}", problems)
            if issubclass(config_class, Config):
                problems.extend(_excesses(config_class, name, arguments[name], f"{where}.{name}"))
                spec = _spec(config_class, name)
                # A model can be used without its registered optimizer, schedule or data set.
                if spec.options.role in IDENTITY and (unregistered := spec.unregistered(arguments[name])) is not None:
                    problems.append(unregistered)
    return from_fields(config_class, **arguments) if len(problems) == before else None


def excesses(config: Any) -> list[str]:
    """Return an error message for each number of a configuration that is too large for its field."""
    kind: type = type(config)
    names = [spec.name for spec in field_specs(kind)]
    return [problem for name in names for problem in _excesses(kind, name, field_value(config, name), name)]


def _spec(config_class: type, name: str) -> FieldSpec:
    return next(spec for spec in field_specs(config_class) if spec.name == name)


def _excesses(config_class: type, name: str, value: Any, where: str) -> list[str]:
    spec = _spec(config_class, name)
    found = (spec.excess(item) for item in (value if isinstance(value, tuple) else (value,)))
    return [f"{where} {excess}" for excess in found if excess is not None]


def _plain_value(annotation: Any, value: Any, where: str, problems: list[str]) -> Any:
    """Check one JSON value against the type of its field; convert lists to tuples and integers to floats."""
    item_type, is_optional, is_sequence = _item_type(annotation)
    if value is None and is_optional:
        return None
    items = value if is_sequence and isinstance(value, (list, tuple)) else [value]
    checked = []
    for item in items:
        if item_type is float and isinstance(item, int) and not isinstance(item, bool):
            with contextlib.suppress(OverflowError):
                item = float(item)
        if type(item) is not item_type:
            problems.append(f"{where}: {item!r} is not a value of type {item_type.__name__}")
        checked.append(item)
    if is_sequence:
        return tuple(checked)
    return checked[0]
