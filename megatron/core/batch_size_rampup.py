"""The global batch size over a run: constant, ramped up, or in steps; and how many samples its iterations make."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizeRampup:
    """Hold the full global batch size and the way to it.

    ``rampup_batch_size`` is empty, or (first size, increment, samples): the size grows from the first by the increment
    in equal shares of the samples until it is ``global_batch_size``. ``steps`` says it size by size in its place: each
    size before the full one, with the consumed samples up to which it holds.
    """

    global_batch_size: int
    rampup_batch_size: tuple[int, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Return the global batch size of the iteration that follows ``consumed_samples``."""
        return next((batch for batch, end in self._phases() if consumed_samples < end), self.global_batch_size)

    def samples_of_iterations(self, iterations: int, consumed_samples: int = 0) -> int:
        """Return how many samples are consumed after that many more iterations."""
        for batch, end in self._phases():
            steps = min(iterations, _iterations_up_to(end, consumed_samples, batch))
            consumed_samples += steps * batch
            iterations -= steps
        return consumed_samples + iterations * self.global_batch_size

    def iterations_of_samples(self, samples: int) -> int:
        """Return how many whole iterations a number of samples makes."""
        consumed_samples = iterations = 0
        for batch, end in self._phases():
            steps = _iterations_up_to(min(end, samples), consumed_samples, batch)
            consumed_samples += steps * batch
            iterations += steps
        return iterations + max(samples - consumed_samples, 0) // max(self.global_batch_size, 1)

    def _phases(self) -> Sequence[tuple[int, int]]:
        """Return (batch size, consumed samples up to which it holds) for each size below the full one."""
        if len(self.rampup_batch_size) != 3:
            return self.steps
        first, increment, samples = self.rampup_batch_size
        num_increments = (self.global_batch_size - first) // increment
        # Rounded up: a size holds while the consumed samples are below its share's end, a whole number or not.
        return [(first + i * increment, -(-(i + 1) * samples // num_increments)) for i in range(num_increments)]


def _iterations_up_to(end: int, consumed_samples: int, batch: int) -> int:
    """Return how many iterations begin before ``end`` samples are consumed."""
    return -(-max(end - consumed_samples, 0) // batch)
