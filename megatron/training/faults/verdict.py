"""What an examination has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.errors import TrainingError

Cause = Literal["weights", "data", "transient device", "persistent device", "right"]
"""What made a result look wrong; ``right`` is a result that is repeated and that nothing speaks against."""


@dataclass(frozen=True)
class Verdict:
    """Hold the cause of a result that looked wrong, and what was found, in words.

    ``samples`` are the ids of those that stand out, ``ranks`` those whose device is to blame.
    """

    cause: Cause
    text: str
    samples: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()


class Rewind(TrainingError):
    """Ask for the run to go on from its newest checkpoint that is known to train; all ranks raise."""
