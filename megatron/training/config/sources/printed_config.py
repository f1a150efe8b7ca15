"""A resolved configuration as the text of a file that --config reads back."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator, Sequence
from typing import Any

from megatron.core.config_base import FieldSpec, field_docs, field_specs
from megatron.training.config.run_config import RunConfig, config_parts

_WIDTH = 118
_ALWAYS = ("tokenizer_type",)
"""Fields that are chosen where they are not given: their default says something too."""
_NEVER = ("config", "model_preset", "print_config", "explain", "use_checkpoint_args")
"""Fields that say where other values come from, which are all here, or what to do in place of training."""


def format_config(config: RunConfig, heading: Sequence[str] = (), with_help: bool = True) -> str:
    """Return TOML: each flag that is not at its default, and as a comment each one that is, below what it does.

    Read back for the same number of processes it resolves to the same configuration.
    """
    lines = [f"# {line}" for line in heading]
    for part, config_class in config_parts().items():
        specs = [spec for spec in field_specs(config_class) if spec.options.cli and spec.name not in _NEVER]
        if not specs:
            continue
        docs, values = field_docs(config_class), getattr(config, part)
        lines += ["", f"[{part}]"]
        for spec in specs:
            lines += _entry(spec, getattr(values, spec.name), docs[spec.name] if with_help else None)
    return "\n".join([*lines, ""])


def _entry(spec: FieldSpec, value: Any, doc: str | None) -> Iterator[str]:
    """Yield the lines of one field; without its documentation, none where it has its default."""
    is_given = value is not None and (value != spec.default or spec.is_required or spec.name in _ALWAYS)
    if doc is not None:
        yield from ("", *textwrap.wrap(doc, _WIDTH, initial_indent="# ", subsequent_indent="# "))
    if is_given:
        yield f"{spec.name} = {_toml(value)}"
    elif doc is not None:
        yield f"# {spec.name} = {'' if value is None else _toml(value)}".rstrip()


def _toml(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_toml(item) for item in value)}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return str(value).lower() if isinstance(value, bool) else repr(value)
