"""Config files (TOML, YAML) and presets: their flags precede those typed on the command line."""

from __future__ import annotations

import dataclasses
import difflib
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron.config.checkpoint_arguments import PRECISION, TOKENIZER
from megatron.config.deprecated_names import deprecation_warning
from megatron.config.extra_arguments import script_defaults
from megatron.config.megatron_flags import NO_EFFECT, NOT_SUPPORTED
from megatron.config.run_config import command_line_fields
from megatron.core.config_base import FieldSpec
from megatron.core.errors import ConfigurationError, StorageError
from megatron.core.object_store import as_path
from megatron.core.safe_io import read_plain_text

FOLDER = Path(__file__).parent / "presets"


def preset_names() -> list[str]:
    """Return the names that ``--model-preset`` takes."""
    return sorted(path.stem for path in FOLDER.glob("*.txt"))


def preset_words(name: str) -> tuple[str, ...]:
    """Return the training flags of a model preset; # starts a comment in its file.

    Raises:
        ConfigurationError: there is no such preset.
    """
    if name not in preset_names():
        nearest = difflib.get_close_matches(name.lower(), preset_names(), n=1, cutoff=0.5)
        names = nearest[0] if nearest else f"llama3.1-8b or another of the {len(preset_names())} files in {FOLDER}"
        raise ConfigurationError(f"--model-preset {name} is not known; use {names}")
    lines = (FOLDER / f"{name}.txt").read_text(encoding="utf-8").splitlines()
    return tuple(word for line in lines for word in line.partition("#")[0].split())


_TOML, _YAML = (".toml",), (".yaml", ".yml")


def read_config_file(path: str) -> Mapping[str, Any]:
    """Return the value of each key of a file; None stands for the default.

    Sections are only headings: all keys are in one namespace. Dashes and underscores are equivalent.

    Raises:
        ConfigurationError: the file cannot be read, or is not a table of keys and plain values; with all problems.
    """
    values: dict[str, Any] = {}
    problems: list[str] = []
    for key, value in _entries(path, _parse(path)):
        if key in values:
            problems.append(f"--config {path}: {key} is set twice; remove one of them")
        elif not _is_plain(value):
            problems.append(f"--config {path}: {key} has a value of type {type(value).__name__}; {_PLAIN}")
        values[key] = value
    if problems:
        raise ConfigurationError(problems)
    return values


_PLAIN = "use a number, string, true, false or a list of numbers or strings"


def _parse(path: str) -> Any:
    suffix = ""
    try:
        file = as_path(path)  # First: the message about a URL does not repeat the URL.
        suffix = file.suffix.lower()
        if suffix not in (*_TOML, *_YAML):
            raise ConfigurationError(f"--config {path} is neither .toml nor .yaml; pass a file of one of these kinds")
        text = read_plain_text(file)
        return _from_toml(path, text) if suffix in _TOML else _from_yaml(path, text)
    except OSError as error:
        raise ConfigurationError(
            f"--config {path} cannot be read: {error.strerror or error}; pass a readable file"
        ) from error
    except StorageError as error:
        raise ConfigurationError(f"--config: {error}") from error
    except (ValueError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ConfigurationError(f"--config {path} is not valid {suffix[1:].upper()}: {reason}") from error


def _from_toml(path: str, text: str) -> Any:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        try:
            import tomli as tomllib
        except ImportError as error:
            raise ConfigurationError(
                f"--config {path}: TOML with Python 3.10 needs tomli; install it with: pip install tomli"
            ) from error
    return tomllib.loads(text)


def _from_yaml(path: str, text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(
            f"--config {path}: YAML needs PyYAML; install it with: pip install pyyaml, or write TOML"
        ) from error
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error


def _entries(path: str, table: Any) -> Iterator[tuple[str, Any]]:
    """Yield each key, with underscores, and its value, including keys in sections."""
    if table is None:
        return
    if not isinstance(table, dict):
        raise ConfigurationError(f"--config {path} contains no keys; write lines such as num_layers = 24")
    for key, value in table.items():
        if not isinstance(value, dict):
            yield str(key).replace("-", "_"), value
            continue
        for name, item in value.items():
            yield str(name).replace("-", "_"), item


def _is_plain(value: Any) -> bool:
    items = value if isinstance(value, list) else [value]
    return all(item is None or isinstance(item, (str, int, float)) for item in items)


def split_switched_off(argv: Sequence[str]) -> tuple[list[str], tuple[FieldSpec, ...]]:
    """Return a command line without ``=true`` and ``=false`` of switches, and the disabled switches.

    ``--bf16=true`` becomes ``--bf16``, and ``--bf16=false`` turns the switch off. If a switch is given both ways, the
    last word counts.
    """
    switches = {name: spec for _, spec in command_line_fields() if spec.is_bool for name in spec.flags}
    off: dict[str, FieldSpec] = {}
    kept: list[tuple[str | None, str]] = []
    for word in argv:
        name, _, value = word.partition("=")
        spec = switches.get(name) if value.lower() in ("", "true", "false") else None
        if spec is not None and value.lower() == "false":
            kept = [(other, rest) for other, rest in kept if other != spec.name]
            off[spec.name] = spec
            continue
        if spec is not None:
            off.pop(spec.name, None)
        if spec is not None and value:
            word = name
        kept.append((None if spec is None else spec.name, word))
    return [word for _, word in kept], tuple(off.values())


_CONFIG, _PRESET = "--config", "--model-preset"
_OWN = ("config", "print_config", "explain")
"""Fields that only the command line can set, because they determine what is done with it."""

_OTHER_TOKENIZER = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file")
"""Fields that select another tokenizer; settings of an earlier tokenizer do not apply to it."""


@dataclasses.dataclass
class _FileWords:
    """Contents of a file: the words of each flag, the flags that it resets to their defaults, and its preset."""

    given: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    dropped: set[str] = dataclasses.field(default_factory=set)
    preset: str | None = None


def with_sources(argv: Sequence[str], switched_off: Collection[FieldSpec], notes: list[str]) -> list[str]:
    """Return a command line with the flags of its preset and its configuration files before the typed flags.

    Later sources override earlier ones, and the typed flags override all: an earlier value is removed, and so are flags
    that the new one excludes (another precision, another tokenizer, --train-samples instead of --train-iters). Switches
    in ``switched_off`` are removed from all sources. Warnings about deprecated names in the files are added to
    ``notes``.

    Raises:
        ConfigurationError: a file cannot be read, or has a key that is no flag; with the problems of all files.
    """
    presets, files, defaults = _values_of(argv, _PRESET), _values_of(argv, _CONFIG), script_defaults()
    if not presets and not files and not defaults:
        return list(argv)
    problems: list[str] = []
    of_script = _words_of(defaults, "args_defaults", "--help-all lists all flags", problems, notes)
    read = list[_FileWords]()
    for name in files:
        try:
            read.append(_read(name, problems, notes))
        except ConfigurationError as error:
            problems += error.problems
    presets = presets or [each.preset for each in read if each.preset is not None]
    settings = of_script.given
    if presets:
        settings = _settle(settings, _by_flag(preset_words(presets[-1])))
    elif of_script.preset is not None:
        settings = _settle(_by_flag(preset_words(of_script.preset)), settings)
    if problems:
        raise ConfigurationError(problems)
    for each in read:
        kept = {flag: words for flag, words in settings.items() if flag not in each.dropped}
        settings = _settle(kept, each.given)
    typed = _by_flag(argv)
    off = {spec.flags[0] for spec in switched_off}
    settings = _settle({flag: words for flag, words in settings.items() if flag not in off}, typed)
    return [word for flag, words in settings.items() if flag not in typed for word in words] + list(argv)


def _values_of(argv: Sequence[str], name: str) -> list[str]:
    """Return the values of a flag on a command line; the parser rejects a flag that lacks its value."""
    found = []
    for place, word in enumerate(argv):
        flag, has_value, value = word.partition("=")
        if flag != name:
            continue
        if has_value:
            found.append(value)
        elif place + 1 < len(argv) and not argv[place + 1].startswith("--"):
            found.append(argv[place + 1])
    return found


def _by_flag(words: Sequence[str]) -> dict[str, list[str]]:
    """Return each flag with its values, by the flag's first name."""
    first = {name: spec.flags[0] for _, spec in command_line_fields() for name in spec.flags}
    found: dict[str, list[str]] = {}
    current: list[str] = []
    for word in words:
        if word.startswith("--"):
            name = word.partition("=")[0]
            current = found.setdefault(first.get(name, name), [])
        current.append(word)
    return found


def _settle(earlier: Mapping[str, list[str]], later: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Return both, without the earlier flags that later ones replace; a flag that is only repeated replaces none."""
    changed = [flag for flag, words in later.items() if _split(words) != _split(earlier.get(flag, []))]
    gone = {other for flag in changed for other in _replaced(flag)}
    return {**{flag: words for flag, words in earlier.items() if flag not in gone}, **later}


def _split(words: Sequence[str]) -> list[str]:
    """Return a flag and its values as words, also if they are one word (``--flag=value``)."""
    return [part for word in words[:1] for part in word.split("=", 1)] + list(words[1:])


def _replaced(flag: str) -> Collection[str]:
    """Return the flags, including this one, whose earlier values this one overrides."""
    specs = {spec.name: spec for _, spec in command_line_fields()}
    spec = next((spec for spec in specs.values() if flag in spec.flags), None)
    if spec is None:
        return (flag,)
    names = {spec.name, *spec.options.excludes}
    names |= {other.name for other in specs.values() if spec.name in other.options.excludes}
    groups = ((PRECISION, PRECISION), (_OTHER_TOKENIZER, TOKENIZER))
    names |= {name for deciding, group in groups if spec.name in deciding for name in group}
    return {specs[name].flags[0] for name in names if name in specs and specs[name].flags}


def _read(path: str, problems: list[str], notes: list[str]) -> _FileWords:
    return _words_of(read_config_file(path), f"--config {path}", "--print-config lists all keys", problems, notes)


def keyword_words(values: Mapping[str, Any], caller: str) -> tuple[list[str], list[str]]:
    """Return the command-line words for keyword arguments, and warnings about deprecated names.

    Keys are the names of fields or flags, with underscores. None stands for the default. ``caller`` is the name of the
    function in messages.

    Raises:
        ConfigurationError: a key is no flag, or a value has the wrong type; with all problems.
    """
    problems: list[str] = []
    notes: list[str] = []
    switched = {name: spec for name, spec in _flags_by_key().items() if isinstance(spec, FieldSpec) and spec.is_bool}
    off = [key for key, value in values.items() if value is False and key in switched]
    found = _words_of(values, caller, "pretrain_gpt.py --help-all lists all flags", problems, notes)
    if problems:
        raise ConfigurationError(problems)
    words = [word for flag, several in found.given.items() for word in several]
    if found.preset is not None:
        words += ["--model-preset", found.preset]
    # A preset or a file may turn a switch on, which False turns off.
    words += [f"{switched[key].flags[0]}=false" for key in off if switched[key].options.negative is None]
    return words, notes


def _words_of(
    values: Mapping[str, Any], place: str, listed_by: str, problems: list[str], notes: list[str]
) -> _FileWords:
    """Return the words of each key; ``place`` begins each message, and ``listed_by`` says where to find all keys."""
    names, found = _flags_by_key(), _FileWords()
    for key, value in values.items():
        spec = names.get(key)
        if isinstance(value, (tuple, Path)):
            value = str(value) if isinstance(value, Path) else list(value)
        if isinstance(spec, FieldSpec):
            key, value = _current_entry(place, key, value, spec, notes)
        if spec is None:
            problems.append(_unknown(place, key, names, listed_by))
        elif isinstance(spec, str):
            found.given[spec] = _table_words(spec, value)
        elif spec.name in _OWN:
            problems.append(f"{place}: {key} belongs on the command line; omit it")
        else:
            words = list(_words(place, key, spec, value, problems))
            if spec.name == "model_preset" and words:
                found.preset = str(value)
            elif words:
                found.given[spec.flags[0]] = words
            else:
                found.dropped.add(spec.flags[0])
    return found


def _current_entry(place: str, key: str, value: Any, spec: FieldSpec, notes: list[str]) -> tuple[str, Any]:
    """Replace a deprecated key and a deprecated value, and add a warning for each."""
    if f"--{key.replace('_', '-')}" in spec.options.deprecated:
        notes.append(f"{deprecation_warning(key, spec.name)} ({place})")
        key = spec.name
    for earlier, current in spec.options.deprecated_values:
        if value == earlier:
            notes.append(f"{deprecation_warning(f'{key} = {value}', f'{key} = {current}')} ({place})")
            value = current
            break
    return key, value


def _flags_by_key() -> dict[str, FieldSpec | str]:
    """Return the field of each key, or its flag if it has no field."""
    found: dict[str, FieldSpec | str] = {name[2:].replace("-", "_"): name for name in (*NO_EFFECT, *NOT_SUPPORTED)}
    for _, spec in command_line_fields():
        found |= {name.lstrip("-").replace("-", "_"): spec for name in (*spec.flags, *spec.options.deprecated)}
        found[spec.name] = spec
    return found


def _unknown(place: str, key: str, known: Collection[str], listed_by: str) -> str:
    nearest = difflib.get_close_matches(key.lower(), known, n=1, cutoff=0.75)
    hint = f"did you mean {nearest[0]}?" if nearest else listed_by
    return f"{place}: unknown key {key}; {hint}"


def _table_words(flag: str, value: Any) -> list[str]:
    if value is None or value is False:
        return []
    return [flag] if value is True else [flag, *(str(item) for item in (value if isinstance(value, list) else [value]))]


def _words(place: str, key: str, spec: FieldSpec, value: Any, problems: list[str]) -> Iterator[str]:
    """Yield the command-line words for a value; none for a switch at its default, an empty list or None."""
    flag, items = spec.flags[0], value if isinstance(value, list) else [value]
    if value is None or value == []:
        return
    if spec.is_bool:
        if not isinstance(value, bool):
            problems.append(f"{place}: {key} = {value!r}: true or false is expected")
        elif value != (key == spec.name and spec.options.negative is not None):
            yield flag
    elif any(isinstance(item, bool) or item is None for item in items):
        problems.append(f"{place}: {key} = {value!r}: {flag} needs {spec.metavar}")
    elif isinstance(value, list) and not spec.is_sequence:
        problems.append(f"{place}: {key} = {value!r}: one value is expected, not a list")
    elif spec.is_sequence and not spec.options.append:
        yield from (flag, *map(str, items))
    else:
        yield from (f"{flag}={item}" for item in items)
