"""Batch sizes by consumed samples."""

from __future__ import annotations

import pytest

from megatron.core.batch_size_rampup import BatchSizeRampup, read_batch_size_schedule
from megatron.core.errors import ConfigurationError


def test_constant_batch() -> None:
    assert [BatchSizeRampup(24).global_batch_size_at(count) for count in (0, 24, 10**9)] == [24, 24, 24]


def test_ramp_grows_in_equal_shares_of_the_samples() -> None:
    batches = BatchSizeRampup(32, (8, 8, 300))
    table = {0: 8, 99: 8, 100: 16, 199: 16, 200: 24, 299: 24, 300: 32, 301: 32, 10**9: 32}
    assert {count: batches.global_batch_size_at(count) for count in table} == table


def test_a_share_of_the_ramp_need_not_be_a_whole_number() -> None:
    batches = BatchSizeRampup(4, (1, 1, 10))
    assert [batches.global_batch_size_at(count) for count in range(11)] == [1, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4]


def test_ramp_from_the_full_size_is_constant() -> None:
    assert [BatchSizeRampup(6, (6, 3, 50)).global_batch_size_at(count) for count in (0, 49, 50)] == [6, 6, 6]


def test_steps_hold_until_they_end() -> None:
    batches = BatchSizeRampup(24, steps=((4, 10), (12, 40)))
    table = {0: 4, 9: 4, 10: 12, 39: 12, 40: 24, 10**9: 24}
    assert {count: batches.global_batch_size_at(count) for count in table} == table
    assert batches.samples_of_iterations(6) == 3 * 4 + 3 * 12
    assert batches.iterations_of_samples(12 + 36 + 24) == 7


@pytest.mark.parametrize("rampup", [(), (2, 2, 60), (1, 1, 100), (3, 3, 0), (2, 5, 47)])
def test_samples_and_iterations_follow_the_batch_of_each_iteration(rampup: tuple[int, ...]) -> None:
    batches = BatchSizeRampup(12, rampup)
    seen = [0]
    for _ in range(60):
        seen.append(seen[-1] + batches.global_batch_size_at(seen[-1]))
    for iteration, consumed in enumerate(seen):
        assert batches.samples_of_iterations(iteration) == consumed
        assert batches.samples_of_iterations(60 - iteration, consumed) == seen[60]
        assert batches.iterations_of_samples(consumed) == iteration


def test_a_ramp_by_hand() -> None:
    # sizes 4, 8, 12 hold for 20 samples each, then 16: 5 x 4, 3 x 8 (to 44), 2 x 12 (to 68), 16 ...
    batches = BatchSizeRampup(16, (4, 4, 60))
    consumed = [batches.samples_of_iterations(count) for count in (0, 1, 5, 6, 8, 10, 11, 13)]
    assert consumed == [0, 4, 20, 28, 44, 68, 84, 116]


def test_samples_within_an_iteration_make_none() -> None:
    batches = BatchSizeRampup(16, (4, 4, 60))
    assert [batches.iterations_of_samples(count) for count in (0, 1, 4, 5, 20, 21)] == [0, 1, 1, 2, 5, 6]
    constant = BatchSizeRampup(16)
    assert [constant.iterations_of_samples(count) for count in (0, 15, 16, 33)] == [0, 0, 1, 2]
    # A size that is reported as wrong elsewhere.
    assert BatchSizeRampup(0).iterations_of_samples(7) == 7


@pytest.mark.parametrize(
    ("text", "steps", "last"),
    [
        ("0:16", (), 16),
        ("0:16 2.4B:320", (16, 2_400_000), 320),
        ("0:4,1K:6 .5m:8, 1T:9", (4, 1, 6, 500, 8, 10**9), 9),
        ("0:4 1999:6 2000:8", (4, 1, 6, 2), 8),
        ("999:4 1000:6", (4, 1), 6),
        ("0:1 1000:1", (1, 1), 1),
    ],
)
def test_a_schedule_of_batch_sizes_is_read_in_whole_samples(text: str, steps: tuple[int, ...], last: int) -> None:
    assert read_batch_size_schedule(text, 1000) == (steps, last)


def test_a_schedule_is_read_for_a_sequence_length_that_is_wrong_itself() -> None:
    assert read_batch_size_schedule("0:4 7:6", 0) == ((4, 7), 6)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "cannot be parsed"),
        ("0:4 7", "cannot be parsed"),
        ("0:4 7Q:6", "cannot be parsed"),
        ("1000:4 2000:8", "must start at 0 tokens"),
        ("0:4 999:8", r"the steps start at samples \[0, 0\]"),
        ("0:4 3K:8 2K:9", r"the steps start at samples \[0, 3, 2\]"),
        ("0:4 1K:0", "a batch size is 0"),
    ],
)
def test_a_schedule_that_does_not_increase_is_rejected(text: str, problem: str) -> None:
    with pytest.raises(ConfigurationError, match=problem):
        read_batch_size_schedule(text, 1000)
