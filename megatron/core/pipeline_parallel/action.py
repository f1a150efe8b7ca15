"""The action: one pass of one micro-batch through one model chunk, and what it receives and sends at its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

RECEIVES_AHEAD = 1
"""Number of receives that a rank posts ahead on each link, before it needs the messages."""


class Pass(Enum):
    """Name a forward pass, a backward pass, one of the halves of a split backward pass, or what a backward pass left.

    A pipeline schedule has, for each micro-batch and chunk, either BACKWARD, or BACKWARD_INPUT and later
    BACKWARD_WEIGHT. OUTPUT_WEIGHT may follow a BACKWARD.
    """

    FORWARD = "forward"
    BACKWARD = "backward"
    BACKWARD_INPUT = "backward_input"
    """Compute the input gradient, which the previous stage waits for."""
    BACKWARD_WEIGHT = "backward_weight"
    """Compute the weight gradient, which no other stage waits for."""
    OUTPUT_WEIGHT = "output_weight"
    """Compute the gradient of the output layer's weight alone, which the backward pass has left out."""

    # The hash that Enum defines formats a string each time, and a large schedule is hashed often.
    __hash__ = object.__hash__

    @property
    def sends_gradient(self) -> bool:
        """Return whether the pass ends with a gradient for the previous stage."""
        return self in (Pass.BACKWARD, Pass.BACKWARD_INPUT)

    @property
    def frees_activations(self) -> bool:
        """Return whether the activations of the forward pass can be freed afterwards."""
        return self in (Pass.BACKWARD, Pass.BACKWARD_WEIGHT)


class Action(NamedTuple):
    """Run one pass of one micro-batch through one model chunk of this rank."""

    kind: Pass
    microbatch: int
    chunk: int = 0


@dataclass(frozen=True)
class StagePlace:
    """Name one rank of a pipeline of ``pp`` ranks that hold ``num_chunks`` model chunks each.

    Chunk ``c`` of rank ``r`` is the global stage ``c * pp + r``. A forward pass receives the activation of the global
    stage before, a backward pass the gradient of the global stage after. Both are on neighbouring ranks, where the
    first rank follows the last one.
    """

    pp: int = 1
    rank: int = 0
    num_chunks: int = 1

    @property
    def next_rank(self) -> int:
        """Return the rank that holds the global stages after this rank's."""
        return (self.rank + 1) % self.pp

    @property
    def previous_rank(self) -> int:
        """Return the rank that holds the global stages before this rank's."""
        return (self.rank - 1) % self.pp

    def is_first(self, chunk: int) -> bool:
        """Return whether a chunk is the model's first."""
        return chunk == 0 and self.rank == 0

    def is_last(self, chunk: int) -> bool:
        """Return whether a chunk is the model's last."""
        return chunk == self.num_chunks - 1 and self.rank == self.pp - 1

    def receives(self, kind: Pass, chunk: int) -> bool:
        """Return whether a pass of a chunk needs a message from another stage."""
        if kind is Pass.FORWARD:
            return not self.is_first(chunk)
        return kind.sends_gradient and not self.is_last(chunk)

    def sends(self, kind: Pass, chunk: int) -> bool:
        """Return whether a pass of a chunk leaves a message for another stage."""
        if kind is Pass.FORWARD:
            return not self.is_last(chunk)
        return kind.sends_gradient and not self.is_first(chunk)


def sends_in_flight(pp: int, actions: Sequence[Action]) -> int:
    """Return the number of sends in flight on a link at which a rank neither deadlocks nor waits needlessly.

    One is enough where neighbours are at most one message apart. Where a chunk takes more than ``pp`` micro-batches in
    a row, the surplus of the group is in flight between the last rank and the first, and waiting for those sends would
    deadlock. The tests compare the times with those of unlimited sends.
    """
    forwards = (action.chunk for action in actions if action.kind is Pass.FORWARD)
    longest_run = max((sum(1 for _ in run) for _, run in groupby(forwards)), default=0)
    one_chunk = all(action.chunk == 0 for action in actions)
    return 1 if one_chunk else max(1, longest_run - pp + 1)
