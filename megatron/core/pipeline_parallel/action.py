"""What a schedule is made of: one pass of one micro-batch through one model chunk."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Pass(Enum):
    """Name the part of a micro-batch's work that an action runs.

    A schedule uses either BACKWARD or, for the same micro-batch and chunk, BACKWARD_INPUT and later BACKWARD_WEIGHT.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    """Compute the gradient of the activations, which the previous stage waits for."""
    BACKWARD_WEIGHT = "backward_weight"
    """Compute the gradient of the weights, which nobody waits for."""

    # The one that the enumeration module makes formats a string each time; a large schedule is hashed often.
    __hash__ = object.__hash__

    @property
    def sends_gradient(self) -> bool:
        """Return whether the pass ends with a gradient for the previous stage."""
        return self in (Pass.BACKWARD, Pass.BACKWARD_INPUT)

    @property
    def frees_activations(self) -> bool:
        """Return whether nothing of the forward pass is needed any more afterwards."""
        return self in (Pass.BACKWARD, Pass.BACKWARD_WEIGHT)


class Action(NamedTuple):
    """Run one pass of one micro-batch through one model chunk of this rank."""

    kind: Pass
    microbatch: int
    chunk: int = 0
