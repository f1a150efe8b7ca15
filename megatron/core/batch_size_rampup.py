"""The global batch size over a run: constant, ramped up, or in steps; and how many samples its iterations make."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megatron.core.errors import ConfigurationError

_FACTORS = {"": 1, "K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_STEP = re.compile(r"(\d{1,18}(?:\.\d*)?|\.\d+)([KMBT]?):(\d{1,18})", re.IGNORECASE)


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


def read_batch_size_schedule(text: str, seq_length: int) -> tuple[tuple[int, ...], int]:
    """Read steps ``TOKENS:SIZE`` in rising order, from 0 tokens on; commas may stand for spaces.

    As in Megatron, a number of tokens is cut down to whole samples.

    Returns:
        Each size but the last and the number of samples at which it ends, in turn; and the last size.

    Raises:
        ConfigurationError: the text cannot be read, or its steps do not rise from 0.
    """
    typed = f"--step-batch-size-schedule {text!r}"
    found = [_STEP.fullmatch(word) for word in text.replace(",", " ").split()]
    steps = [(float(match[1]) * _FACTORS[match[2].upper()], int(match[3])) for match in found if match]
    if not steps or len(steps) < len(found):
        raise ConfigurationError(f"{typed} cannot be read; give TOKENS:SIZE pairs, such as '0:16 2.4B:320'")
    starts = [int(tokens) // max(seq_length, 1) for tokens, _ in steps]
    if starts[0] != 0 or any(after <= before for before, after in itertools.pairwise(starts)):
        raise ConfigurationError(
            f"{typed}: steps must begin at 0 tokens and rise by a sequence or more; they begin at samples {starts}"
        )
    if any(size == 0 for _, size in steps):
        raise ConfigurationError(f"{typed}: a batch size of 0; give sizes above 0")
    ended = [number for (_, size), end in zip(steps, starts[1:]) for number in (size, end)]
    return tuple(ended), steps[-1][1]
