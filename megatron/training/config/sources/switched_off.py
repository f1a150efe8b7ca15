"""Switches that are typed as off, whatever turns them on: ``--sequence-parallel=false``."""

from __future__ import annotations

from collections.abc import Sequence

from megatron.core.config_base import FieldSpec
from megatron.training.config.run_config import command_line_fields

_OFF = "=false"


def split_switched_off(argv: Sequence[str]) -> tuple[list[str], tuple[FieldSpec, ...]]:
    """Return a command line without the words that turn switches off, and these switches.

    Of a switch that is typed both ways the last word counts.
    """
    switches = {name: spec for _, spec in command_line_fields() if spec.is_bool for name in spec.flags}
    off: dict[str, FieldSpec] = {}
    kept: list[tuple[str | None, str]] = []
    for word in argv:
        spec = switches.get(word.removesuffix(_OFF))
        if spec is not None and word.endswith(_OFF):
            kept = [(name, other) for name, other in kept if name != spec.name]
            off[spec.name] = spec
            continue
        if spec is not None:
            off.pop(spec.name, None)
        kept.append((None if spec is None else spec.name, word))
    return [word for _, word in kept], tuple(off.values())
