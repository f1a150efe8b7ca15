"""What an examination has found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megatron.core.errors import TrainingError

Cause = Literal["weights", "data", "transient device", "persistent device", "training", "overflow", "right"]
"""What made a result look wrong.

``training`` is a model that other samples look as wrong to and no device made so, ``overflow`` what is too large for
float16, and ``right`` a result that is repeated and that nothing speaks against.
"""


@dataclass(frozen=True)
class Verdict:
    """Hold the cause of a result that looked wrong, and what was found, in words.

    ``samples`` are the ids of those that stand out, ``ranks`` those whose device is to blame, or may be.
    """

    cause: Cause
    text: str
    samples: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()


class Rewind(TrainingError):
    """Ask for the run to go on from its newest checkpoint that is known to train; all ranks raise."""
