"""Flags and values of an earlier release: the command line accepts them for one release, with a warning.

Every command renames words; only commands that configure a run import `run_config`, which takes 0.1 s.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from megatron.core.config_base import with_current_names


def deprecation_warning(earlier: str, current: str) -> str:
    """Return the warning about a deprecated name."""
    return f"WARNING: {earlier} is now {current}; the next release removes the old name"


def deprecated_flags() -> dict[str, str]:
    """Return the current flag of a training run by each deprecated one."""
    from megatron.config.run_config import command_line_fields

    fields = command_line_fields("deprecated")
    return {earlier: spec.flags[0] for _, spec in fields for earlier in spec.options.deprecated}


def with_current_flags(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Replace the deprecated names on the command line of a training run, as `rename_words` does."""
    from megatron.config.run_config import command_line_fields

    fields = command_line_fields("deprecated_values")
    values = {spec.flags[0]: dict(spec.options.deprecated_values) for _, spec in fields}
    return rename_words(words, deprecated_flags(), values)


def rename_words(
    words: Sequence[str], flags: Mapping[str, str], values: Mapping[str, Mapping[str, str]]
) -> tuple[list[str], list[str]]:
    """Replace deprecated names on a command line, and return a warning for each.

    ``flags`` maps deprecated flags to current ones, and ``values`` does the same for the values of current flags.
    Words after ``--`` belong to another command and stay as they are.
    """
    renamed: list[str] = []
    warnings: dict[str, None] = {}
    flag = ""
    for place, word in enumerate(words):
        if word == "--":
            renamed += words[place:]
            break
        is_flag = word.startswith("--")
        name, has_value, value = word.partition("=") if is_flag else (flag, "", word)
        flag = flags.get(name, name)
        if flag != name:
            warnings[deprecation_warning(name, flag)] = None
        current = values.get(flag, {}).get(value, value)
        if current != value:
            warnings[deprecation_warning(f"{flag} {value}", f"{flag} {current}")] = None
        renamed.append(f"{flag}{has_value}{current}" if is_flag else current)
    return renamed, list(warnings)


def with_current_fields(config: Mapping[str, Any]) -> dict[str, Any]:
    """Replace deprecated names of fields and of choices in a stored configuration of a run."""
    from megatron.config.run_config import config_parts

    parts = config_parts()
    return {
        name: with_current_names(parts[name], values) if name in parts and isinstance(values, Mapping) else values
        for name, values in dict(config).items()
    }
