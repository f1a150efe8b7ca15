"""Schedules as data: the order in which a rank runs the forward and backward passes of its micro-batches."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Pass(Enum):
    """Name the half of a micro-batch's work that an action runs."""

    FORWARD = "forward"
    BACKWARD = "backward"


@dataclass(frozen=True)
class Action:
    """Run one pass of one micro-batch through one model chunk of this rank."""

    kind: Pass
    microbatch: int
    chunk: int = 0


def forward_only(num_microbatches: int) -> tuple[Action, ...]:
    """Return the forward passes of all micro-batches in order, for evaluation on a single stage."""
    return tuple(Action(Pass.FORWARD, microbatch) for microbatch in range(num_microbatches))


def without_pipelining(num_microbatches: int) -> tuple[Action, ...]:
    """Return forward and backward of each micro-batch in turn: one micro-batch's activations are alive at a time."""
    return tuple(
        Action(kind, microbatch) for microbatch in range(num_microbatches) for kind in (Pass.FORWARD, Pass.BACKWARD)
    )
