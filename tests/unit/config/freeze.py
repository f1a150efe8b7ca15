"""Add new flags, defaults and checkpoint fields to the frozen lists in this folder, with ``make generate``.

A list only grows: the exit status is 1 if an entry has gone or a default has changed, and that list is left as it is.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron.config.arguments import all_flags, resolve_arguments
from tests.unit.config.command_lines import MINIMAL
from tests.unit.config.test_arguments import DEFAULTS, FROZEN
from tests.unit.config.test_checkpoint_arguments import TAKEN, taken_fields


def lost_defaults(frozen: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the frozen defaults that are gone or differ."""
    lost = set()
    for name, value in frozen.items():
        if isinstance(value, dict) and isinstance(now.get(name), dict):
            lost |= {f"{name}.{inner}" for inner in lost_defaults(value, now[name])}
        elif name not in now or now[name] != value:
            lost.add(name)
    return lost


def main() -> int:
    """Write the lists, and return the exit status."""
    flags, old_flags = set(all_flags()), FROZEN.read_text(encoding="utf-8").split()
    defaults = json.loads(json.dumps(resolve_arguments(MINIMAL, 1).config.to_dict()))
    with tempfile.TemporaryDirectory() as folder:
        fields = taken_fields(Path(folder))
    lists = (
        (FROZEN, set(old_flags) - flags, "".join(f"{flag}\n" for flag in sorted(flags))),
        (DEFAULTS, lost_defaults(json.loads(DEFAULTS.read_text(encoding="utf-8")), defaults), dump(defaults)),
        (TAKEN, set(TAKEN.read_text(encoding="utf-8").split()) - set(fields), "".join(f"{name}\n" for name in fields)),
    )
    for path, lost, text in lists:
        if lost:
            print(f"{path.name} is left as it is: {', '.join(sorted(lost))} is gone or differs", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
    return int(any(lost for _, lost, _ in lists))


def dump(values: object) -> str:
    return json.dumps(values, indent=2) + "\n"


if __name__ == "__main__":
    sys.exit(main())
