"""The global batch size and the number of micro-batches after a number of samples: constant, or ramped up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from megatron.core.errors import ConfigurationError


class BatchSizes(Protocol):
    """Name the batch sizes of a configuration.

    ``rampup_batch_size`` is empty, or (first size, increment, samples): the size grows from the first by the increment
    in equal shares of the samples until it is ``global_batch_size``.
    """

    @property
    def global_batch_size(self) -> int:
        """Return the full size."""

    @property
    def rampup_batch_size(self) -> tuple[int, ...]:
        """Return the ramp."""


def global_batch_size_at(sizes: BatchSizes, consumed_samples: int) -> int:
    """Return the global batch size of the iteration that follows ``consumed_samples``."""
    if not sizes.rampup_batch_size:
        return sizes.global_batch_size
    first, increment, ramp_samples = sizes.rampup_batch_size
    if consumed_samples >= ramp_samples:
        return sizes.global_batch_size
    num_increments = (sizes.global_batch_size - first) // increment
    # Integers throughout: a float share of the ramp could make an increment come a sample too early or too late.
    return first + consumed_samples * num_increments // ramp_samples * increment


@dataclass(frozen=True, kw_only=True)
class NumMicrobatchesCalculator:
    """Give the batch of the iteration that follows a number of consumed samples (see `BatchSizes`).

    Raises:
        ConfigurationError: some size on the way is not a whole number of micro-batches, or the full one is not reached.
    """

    global_batch_size: int
    micro_batch_size: int
    data_parallel_size: int = 1
    rampup_batch_size: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        """Refuse what cannot be computed with, all problems together."""
        problems = self._rampup_problems() if self.rampup_batch_size else []
        for size in sorted({*self.rampup_batch_size[:2], self.global_batch_size}):
            if size % self.samples_per_microbatch:
                problems.append(
                    f"batch size {size} is not divisible by micro batch size ({self.micro_batch_size}) x data-"
                    f"parallel size ({self.data_parallel_size}) = {self.samples_per_microbatch}; change "
                    "--global-batch-size, --rampup-batch-size or --micro-batch-size"
                )
        if problems:
            raise ConfigurationError(problems)

    def _rampup_problems(self) -> list[str]:
        given = " ".join(str(value) for value in self.rampup_batch_size)
        if len(self.rampup_batch_size) != 3 or min(self.rampup_batch_size) <= 0:
            return [
                f"--rampup-batch-size {given} is not three positive numbers: the first size, the increment and the "
                "samples over which it grows"
            ]
        first, increment, _ = self.rampup_batch_size
        if first > self.global_batch_size or (self.global_batch_size - first) % increment:
            return [
                f"--rampup-batch-size {given} does not lead to --global-batch-size {self.global_batch_size}: "
                f"{first} plus a multiple of {increment} must equal it"
            ]
        return []

    @property
    def samples_per_microbatch(self) -> int:
        """Return the samples that one micro-batch holds over all data-parallel ranks."""
        return self.micro_batch_size * self.data_parallel_size

    def global_batch_size_at(self, consumed_samples: int) -> int:
        """Return the global batch size of the iteration that follows ``consumed_samples``."""
        return global_batch_size_at(self, consumed_samples)
