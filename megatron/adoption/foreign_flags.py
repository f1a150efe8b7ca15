"""Flags of other trainers: what stands for them here, and what that changes.

`foreign_flags.tsv` has one line for each flag, or for one value of it, or for all flags of a beginning (``--moe-*``).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

_TABLE = Path(__file__).with_name("foreign_flags.tsv")


@dataclasses.dataclass(frozen=True)
class ForeignFlag:
    """Describe a flag of another trainer.

    ``becomes`` are the flags that stand for it, ``{}`` its values, nothing where it is left out. Of several, the
    first is meant and the others are what it needs unless the command has them. ``needs_decision`` tells that
    what is computed changes in a way that its user must agree to.
    """

    flag: str
    arity: int | str
    becomes: str
    trainer: str
    needs_decision: bool
    change: str


@functools.cache
def foreign_flags() -> Mapping[str, ForeignFlag]:
    """Return the table by flag, or by flag and value."""
    rows = [line.split("\t") for line in _TABLE.read_text(encoding="utf-8").splitlines()[1:]]
    return {
        flag: ForeignFlag(flag, int(values) if values.isdigit() else values, becomes, trainer, decide == "yes", change)
        for flag, values, becomes, trainer, decide, change in rows
    }


def foreign_flag(name: str, values: tuple[str, ...] = ()) -> ForeignFlag | None:
    """Return what is known of a flag with these values; the line of the value goes before the flag's."""
    table = foreign_flags()
    for key in (" ".join((name, *values)), name):
        if key in table:
            return table[key]
    beginnings = (key for key in table if key.endswith("*") and name.startswith(key[:-1]))
    return next((table[key] for key in beginnings), None)
