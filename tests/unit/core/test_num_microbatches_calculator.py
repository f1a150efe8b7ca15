"""Batch sizes by consumed samples."""

from __future__ import annotations

import pytest

from megatron.core.errors import ConfigurationError
from megatron.core.num_microbatches_calculator import NumMicrobatchesCalculator, global_batch_size_at
from megatron.training.config.run_config import iterations_of_samples, samples_of_iterations
from megatron.training.config.training_config import TrainingConfig


def test_constant_batch() -> None:
    batches = NumMicrobatchesCalculator(global_batch_size=24, micro_batch_size=2, data_parallel_size=3)
    assert [batches.global_batch_size_at(count) for count in (0, 24, 10**9)] == [24, 24, 24]


def test_ramp_grows_in_equal_shares_of_the_samples() -> None:
    batches = NumMicrobatchesCalculator(
        global_batch_size=32, micro_batch_size=2, data_parallel_size=2, rampup_batch_size=(8, 8, 300)
    )
    table = {0: 8, 99: 8, 100: 16, 199: 16, 200: 24, 299: 24, 300: 32, 301: 32, 10**9: 32}
    assert {count: batches.global_batch_size_at(count) for count in table} == table


def test_a_share_of_the_ramp_need_not_be_a_whole_number() -> None:
    batches = NumMicrobatchesCalculator(global_batch_size=4, micro_batch_size=1, rampup_batch_size=(1, 1, 10))
    assert [batches.global_batch_size_at(count) for count in range(11)] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def test_ramp_from_the_full_size_is_constant() -> None:
    batches = NumMicrobatchesCalculator(global_batch_size=6, micro_batch_size=3, rampup_batch_size=(6, 3, 50))
    assert [batches.global_batch_size_at(count) for count in (0, 49, 50)] == [6, 6, 6]


@pytest.mark.parametrize(
    ("rampup", "message"),
    [
        ((8, 8), "8 8 is not three positive numbers"),
        ((8, 0, 100), "8 0 100 is not three positive numbers"),
        ((40, 8, 100), "does not lead to --global-batch-size 32"),
        ((8, 16, 100), "8 plus a multiple of 16"),
        ((6, 13, 100), "batch size 6 is not divisible by micro batch size"),
    ],
)
def test_impossible_ramps_are_refused(rampup: tuple[int, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        NumMicrobatchesCalculator(
            global_batch_size=32, micro_batch_size=2, data_parallel_size=2, rampup_batch_size=rampup
        )


def test_all_problems_are_reported_together() -> None:
    with pytest.raises(ConfigurationError) as caught:
        NumMicrobatchesCalculator(
            global_batch_size=30, micro_batch_size=4, data_parallel_size=2, rampup_batch_size=(6, 9, 100)
        )
    assert len(caught.value.problems) == 4


@pytest.mark.parametrize("rampup", [(), (2, 2, 60), (1, 1, 100), (3, 3, 0), (2, 5, 47)])
def test_lengths_of_a_configured_run_follow_the_same_ramp(rampup: tuple[int, ...]) -> None:
    training = TrainingConfig(micro_batch_size=1, global_batch_size=12, rampup_batch_size=rampup)
    consumed = 0
    for iteration in range(60):
        assert samples_of_iterations(training, iteration) == consumed
        assert iterations_of_samples(training, consumed) == iteration
        consumed += global_batch_size_at(training, consumed)
