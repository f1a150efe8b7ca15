"""Calculators of the number of micro-batches: constant and growing global batch sizes, and the process-wide one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron.core import num_microbatches_calculator as calculators


@pytest.fixture(autouse=True)
def no_calculator() -> Iterator[None]:
    calculators.unset_num_microbatches_calculator()
    yield
    calculators.unset_num_microbatches_calculator()


def test_process_wide_calculator_is_set_once_and_replaced() -> None:
    with pytest.raises(AssertionError, match="call init_num_microbatches_calculator first"):
        calculators.get_num_microbatches()
    calculators.init_num_microbatches_calculator(0, None, 30, 5, 2)
    assert (calculators.get_num_microbatches(), calculators.get_micro_batch_size()) == (3, 5)
    with pytest.raises(AssertionError, match="is initialized already"):
        calculators.init_num_microbatches_calculator(0, None, 30, 5, 2)
    calculators.reconfigure_num_microbatches_calculator(0, None, 33, 5, 2, True)
    assert calculators.get_current_global_batch_size() == 33
    assert calculators.get_current_running_global_batch_size() == 30


@pytest.mark.parametrize("sizes", [(33, 5, 2), (0, 5, 2), (30, 0, 2)])
def test_sizes_that_do_not_fit_are_rejected(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError, match=str(sizes[1])):
        calculators.ConstantNumMicroBatchesCalculator(*sizes, False, 0)


def test_growing_batch_size_follows_the_consumed_samples() -> None:
    calculators.init_num_microbatches_calculator(0, [6, 3, 40], 12, 3, 1)
    sizes, consumed = [], 0
    for _ in range(8):
        sizes.append((consumed, calculators.get_current_global_batch_size(), calculators.get_num_microbatches()))
        consumed += calculators.get_current_global_batch_size()
        calculators.update_num_microbatches(consumed)
    assert sizes == [
        (0, 6, 2), (6, 6, 2), (12, 6, 2), (18, 6, 2), (24, 9, 3), (33, 9, 3), (42, 12, 4), (54, 12, 4)
    ]  # fmt: skip


def test_growing_batch_size_is_checked_for_the_micro_batch_size_on_update() -> None:
    growing = calculators.RampupBatchsizeNumMicroBatchesCalculator(12, 6, 1, False, 0, 6, 3, 40)
    with pytest.raises(AssertionError, match="9 is not divisible by micro_batch_size 6"):
        growing.update(20, consistency_check=True)
    growing.update(40, consistency_check=True)
    assert growing.get() == 2
    with pytest.raises(AssertionError, match="cannot grow from 6 to 12 by increments of 4"):
        calculators.RampupBatchsizeNumMicroBatchesCalculator(12, 6, 1, False, 0, 6, 4, 40)
