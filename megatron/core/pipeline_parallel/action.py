"""The action: one pass of one micro-batch through one model chunk, and what it receives and sends at its place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import groupby
from typing import NamedTuple

RECEIVES_AHEAD = 1
"""How many messages a rank has posted receives for, on each link, before it needs them."""


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


@dataclass(frozen=True)
class StagePlace:
    """Name one rank of a pipeline of ``pp`` ranks that hold ``num_chunks`` model chunks each.

    What an action receives and sends follows from its chunk's place: a forward pass takes the activation of the
    global stage before, a backward pass the gradient of the one after. Both neighbours of a global stage are on the
    neighbouring ranks, the last rank's next one being the first.
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
    """Return how many unfinished sends on a link a rank may leave behind when it goes on, never waiting needlessly.

    One is enough where neighbours work at most one message apart. Where a chunk takes more than ``pp`` micro-batches
    in a row, the surplus of the group lies waiting between the last rank and the first: waiting for those sends would
    close a circle. The tests compare the times with those of unlimited sends.
    """
    forwards = (action.chunk for action in actions if action.kind is Pass.FORWARD)
    longest_run = max((sum(1 for _ in run) for _, run in groupby(forwards)), default=0)
    one_chunk = all(action.chunk == 0 for action in actions)
    return 1 if one_chunk else max(1, longest_run - pp + 1)
