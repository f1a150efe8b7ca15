"""What the command line says of parameters by name: multipliers of the learning rate and of the weight decay."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fnmatch import fnmatchcase


@dataclass(frozen=True)
class GroupOverride:
    """Hold the multipliers of parameters whose names match a pattern; None leaves what they would have without it."""

    pattern: str
    lr_mult: float | None = None
    wd_mult: float | None = None

    def matches(self, name: str) -> bool:
        """Return whether a parameter's global name is meant; ``*`` stands for any characters, dots among them."""
        return fnmatchcase(name, self.pattern)


def parse_override(text: str) -> GroupOverride:
    """Return what ``PATTERN:lr_mult=X,wd_mult=Y`` says, of which one multiplier may be left out.

    Raises:
        ValueError: it says something else; the message says what.
    """
    pattern, colon, assignments = text.rpartition(":")
    if not pattern or not colon:
        raise ValueError("it has no pattern and multipliers with a colon between")
    values: dict[str, float] = {}
    for assignment in assignments.split(","):
        name, equals, number = assignment.partition("=")
        if name not in ("lr_mult", "wd_mult") or not equals:
            raise ValueError(f"{assignment!r} is neither lr_mult=NUMBER nor wd_mult=NUMBER")
        if name in values:
            raise ValueError(f"{name} is there twice")
        try:
            values[name] = float(number)
        except ValueError:
            raise ValueError(f"{number!r} of {name} is not a number") from None
        if not 0.0 <= values[name] < math.inf:
            raise ValueError(f"{name}={number} must be 0 or more")
    return GroupOverride(pattern, **values)
