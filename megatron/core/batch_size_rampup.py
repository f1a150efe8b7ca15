"""Global batch size schedule: constant, linear ramp-up or steps, and conversion between iterations and samples."""

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
    """Global batch size and its schedule.

    ``rampup_batch_size`` is empty, or (start size, increment, ramp-up samples): the size grows from the start size by
    the increment in equal intervals of samples until it reaches ``global_batch_size``. ``steps`` lists the sizes
    explicitly instead: each size before the final one, with the number of consumed samples at which it ends.
    """

    global_batch_size: int
    rampup_batch_size: tuple[int, ...] = ()
    steps: tuple[tuple[int, int], ...] = ()

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Return the global batch size of the iteration that follows ``consumed_samples``."""
        return next((batch for batch, end in self._phases() if consumed_samples < end), self.global_batch_size)

    def samples_of_iterations(self, iterations: int, consumed_samples: int = 0) -> int:
        """Return the number of consumed samples after ``iterations`` more iterations."""
        for batch, end in self._phases():
            steps = min(iterations, _iterations_up_to(end, consumed_samples, batch))
            consumed_samples += steps * batch
            iterations -= steps
        return consumed_samples + iterations * self.global_batch_size

    def iterations_of_samples(self, samples: int) -> int:
        """Return the number of whole iterations that consume at most ``samples`` samples."""
        consumed_samples = iterations = 0
        for batch, end in self._phases():
            steps = _iterations_up_to(min(end, samples), consumed_samples, batch)
            consumed_samples += steps * batch
            iterations += steps
        return iterations + max(samples - consumed_samples, 0) // max(self.global_batch_size, 1)

    def _phases(self) -> Sequence[tuple[int, int]]:
        """Return (batch size, consumed samples at which it ends) for each size before the final one."""
        if len(self.rampup_batch_size) != 3:
            return self.steps
        first, increment, samples = self.rampup_batch_size
        num_increments = (self.global_batch_size - first) // increment
        # Rounded up: a size ends at the first sample count at or above the end of its interval, which may be
        # fractional.
        return [(first + i * increment, -(-(i + 1) * samples // num_increments)) for i in range(num_increments)]


def _iterations_up_to(end: int, consumed_samples: int, batch: int) -> int:
    """Return the number of iterations that start before ``end`` samples are consumed."""
    return -(-max(end - consumed_samples, 0) // batch)


def read_batch_size_schedule(text: str, seq_length: int) -> tuple[tuple[int, ...], int]:
    """Parse ``TOKENS:SIZE`` steps in increasing order, starting at 0 tokens and separated by spaces or commas.

    As in Megatron-LM, a number of tokens is rounded down to whole samples.

    Returns:
        A flat tuple of each size except the last and the number of samples at which it ends; and the last size.

    Raises:
        ConfigurationError: the text cannot be parsed, or its steps do not increase from 0.
    """
    typed = f"--step-batch-size-schedule {text!r}"
    found = [_STEP.fullmatch(word) for word in text.replace(",", " ").split()]
    steps = [(float(match[1]) * _FACTORS[match[2].upper()], int(match[3])) for match in found if match]
    if not steps or len(steps) < len(found):
        raise ConfigurationError(f"{typed} cannot be parsed; use TOKENS:SIZE pairs, such as '0:16 2.4B:320'")
    starts = [int(tokens) // max(seq_length, 1) for tokens, _ in steps]
    if starts[0] != 0 or any(after <= before for before, after in itertools.pairwise(starts)):
        raise ConfigurationError(
            f"{typed}: the first step must start at 0 tokens, and each next step must start at least one sequence "
            f"later; the steps start at samples {starts}"
        )
    if any(size == 0 for _, size in steps):
        raise ConfigurationError(f"{typed}: a batch size is 0; use sizes above 0")
    ended = [number for (_, size), end in zip(steps, starts[1:]) for number in (size, end)]
    return tuple(ended), steps[-1][1]
