"""megatron-core's calculators of the number of micro-batches per step, and the process-wide calculator.

The framework's own training loop uses `BatchSizeRampup`, from which these calculators take the global batch size.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from megatron.core.batch_size_rampup import BatchSizeRampup

logger = logging.getLogger(__name__)


class NumMicroBatchesCalculator:
    """Number of micro-batches per step, and the sizes from which it is computed.

    The running global batch size is the current one, rounded down to a multiple of micro batch size times data-parallel
    size if ``decrease_batch_size_if_needed``.

    Raises:
        AssertionError: a size is not positive, the global batch size is too small, or it is not divisible.
    """

    def __init__(
        self,
        schedule: BatchSizeRampup,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
    ) -> None:
        self.global_batch_size = schedule.global_batch_size
        self.micro_batch_size = micro_batch_size
        self.data_parallel_size = data_parallel_size
        self.decrease_batch_size_if_needed = decrease_batch_size_if_needed
        self.rank = rank
        self.micro_batch_times_data_parallel_size = micro_batch_size * data_parallel_size
        assert self.micro_batch_times_data_parallel_size > 0, (
            f"micro_batch_size {micro_batch_size} and data_parallel_size {data_parallel_size} must be positive"
        )
        self._schedule = schedule
        self._set_sizes(schedule.global_batch_size_at(0))

    def get(self) -> int:
        """Return the number of micro-batches."""
        return self.num_micro_batches

    def get_current_global_batch_size(self) -> int:
        return self.current_global_batch_size

    def get_micro_batch_size(self) -> int:
        return self.micro_batch_size

    def get_current_running_global_batch_size(self) -> int:
        return self.current_running_global_batch_size

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Set the sizes of the step that follows ``consumed_samples``; with ``verbose`` rank 0 logs a change.

        Raises:
            AssertionError: with ``consistency_check``, the global batch size is not divisible.
        """
        before = self.current_global_batch_size
        self._set_sizes(self._schedule.global_batch_size_at(consumed_samples))
        if consistency_check and not self.decrease_batch_size_if_needed:
            self._check_divisible()
        if verbose and self.rank == 0 and before != self.current_global_batch_size:
            logger.info("global batch size: %d -> %d", before, self.current_global_batch_size)

    def _set_sizes(self, global_batch_size: int) -> None:
        self.current_global_batch_size = global_batch_size
        self.num_micro_batches = global_batch_size // self.micro_batch_times_data_parallel_size
        self.current_running_global_batch_size = global_batch_size
        if self.decrease_batch_size_if_needed:
            self.current_running_global_batch_size = self.num_micro_batches * self.micro_batch_times_data_parallel_size

    def _check_divisible(self) -> None:
        assert self.current_global_batch_size % self.micro_batch_times_data_parallel_size == 0, (
            f"global batch size {self.current_global_batch_size} is not divisible by micro_batch_size "
            f"{self.micro_batch_size} * data_parallel_size {self.data_parallel_size}"
        )


class ConstantNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """Calculator of a constant global batch size."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
    ) -> None:
        schedule = BatchSizeRampup(global_batch_size)
        super().__init__(schedule, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)
        if not decrease_batch_size_if_needed:
            self._check_divisible()
        assert self.num_micro_batches >= 1, (
            f"global batch size {global_batch_size} is smaller than micro_batch_size {micro_batch_size} * "
            f"data_parallel_size {data_parallel_size}"
        )

    def update(self, consumed_samples: int, consistency_check: bool, verbose: bool = False) -> None:
        """Do nothing: the global batch size is constant."""


class RampupBatchsizeNumMicroBatchesCalculator(NumMicroBatchesCalculator):
    """Calculator of a global batch size that grows from a start size by equal increments over ``ramup_samples``."""

    def __init__(
        self,
        global_batch_size: int,
        micro_batch_size: int,
        data_parallel_size: int,
        decrease_batch_size_if_needed: bool,
        rank: int,
        start_global_batch_size: int,
        batch_size_increment: int,
        ramup_samples: int,
    ) -> None:
        assert min(global_batch_size, start_global_batch_size, batch_size_increment) > 0, (
            f"sizes must be positive: global batch size {global_batch_size}, start {start_global_batch_size}, "
            f"increment {batch_size_increment}"
        )
        assert ramup_samples >= 0, f"ramup_samples {ramup_samples} must not be negative"
        growth = global_batch_size - start_global_batch_size
        assert growth >= 0, f"start size {start_global_batch_size} is above the global batch size {global_batch_size}"
        assert growth % batch_size_increment == 0, (
            f"the global batch size cannot grow from {start_global_batch_size} to {global_batch_size} by increments of "
            f"{batch_size_increment}"
        )
        self.start_global_batch_size = start_global_batch_size
        self.batch_size_increment = batch_size_increment
        self.ramup_samples = ramup_samples
        schedule = BatchSizeRampup(global_batch_size, (start_global_batch_size, batch_size_increment, ramup_samples))
        super().__init__(schedule, micro_batch_size, data_parallel_size, decrease_batch_size_if_needed, rank)


_GLOBAL_NUM_MICROBATCHES_CALCULATOR: NumMicroBatchesCalculator | None = None


def init_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Set the process-wide calculator.

    Raises:
        AssertionError: it is set already, or a size does not fit.
    """
    assert _GLOBAL_NUM_MICROBATCHES_CALCULATOR is None, (
        "the calculator is initialized already; call reconfigure_num_microbatches_calculator to replace it"
    )
    reconfigure_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
    )


def reconfigure_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool = False,
) -> None:
    """Replace the process-wide calculator, or set the first one."""
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = _build_num_microbatches_calculator(
        rank,
        rampup_batch_size,
        global_batch_size,
        micro_batch_size,
        data_parallel_size,
        decrease_batch_size_if_needed,
    )


def unset_num_microbatches_calculator() -> None:
    """Remove the process-wide calculator."""
    global _GLOBAL_NUM_MICROBATCHES_CALCULATOR
    _GLOBAL_NUM_MICROBATCHES_CALCULATOR = None


destroy_num_microbatches_calculator = unset_num_microbatches_calculator


def get_num_microbatches() -> int:
    """Return the process-wide number of micro-batches."""
    return _calculator().get()


def get_micro_batch_size() -> int:
    return _calculator().get_micro_batch_size()


def get_current_global_batch_size() -> int:
    return _calculator().get_current_global_batch_size()


def get_current_running_global_batch_size() -> int:
    return _calculator().get_current_running_global_batch_size()


def update_num_microbatches(consumed_samples: int, consistency_check: bool = True, verbose: bool = False) -> None:
    """Set the process-wide sizes of the step that follows ``consumed_samples``."""
    _calculator().update(consumed_samples, consistency_check, verbose)


def _calculator() -> NumMicroBatchesCalculator:
    assert _GLOBAL_NUM_MICROBATCHES_CALCULATOR is not None, (
        "no calculator is initialized; call init_num_microbatches_calculator first"
    )
    return _GLOBAL_NUM_MICROBATCHES_CALCULATOR


def _build_num_microbatches_calculator(
    rank: int,
    rampup_batch_size: Sequence[int] | None,
    global_batch_size: int,
    micro_batch_size: int,
    data_parallel_size: int,
    decrease_batch_size_if_needed: bool,
) -> NumMicroBatchesCalculator:
    """Return a calculator of a constant global batch size, or of (start size, increment, samples)."""
    sizes = (global_batch_size, micro_batch_size, data_parallel_size)
    if rampup_batch_size is None:
        return ConstantNumMicroBatchesCalculator(*sizes, decrease_batch_size_if_needed, rank)
    assert len(rampup_batch_size) == 3, (
        f"rampup_batch_size {list(rampup_batch_size)} must have three numbers: start size, increment, samples"
    )
    start, increment, samples = (int(number) for number in rampup_batch_size)
    return RampupBatchsizeNumMicroBatchesCalculator(
        *sizes, decrease_batch_size_if_needed, rank, start, increment, samples
    )
