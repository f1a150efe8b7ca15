"""The micro-batches of one iteration, read once and held until every model chunk has used them."""

from __future__ import annotations

from typing import Protocol

from megatron.core.datasets.batch import Batch


class MicrobatchSource(Protocol):
    """Give micro-batches in order."""

    def next(self) -> Batch:
        """Return the next micro-batch on this process's device."""
        ...


class Microbatches:
    """Give each of a rank's model chunks the micro-batches of an iteration by number.

    Every chunk asks for them in order, but chunks are at different ones at a time: what the first has read is kept
    until the last has had it.
    """

    def __init__(self, source: MicrobatchSource, num_chunks: int) -> None:
        self._source = source
        self._num_chunks = num_chunks
        self._num_read = 0
        self._held: dict[int, Batch] = {}
        self._num_uses: dict[int, int] = {}

    def take(self, microbatch: int) -> Batch:
        """Return a micro-batch; the call of the last chunk lets go of it."""
        while self._num_read <= microbatch:
            self._held[self._num_read] = self._source.next()
            self._num_uses[self._num_read] = 0
            self._num_read += 1
        self._num_uses[microbatch] += 1
        if self._num_uses[microbatch] < self._num_chunks:
            return self._held[microbatch]
        del self._num_uses[microbatch]
        return self._held.pop(microbatch)
