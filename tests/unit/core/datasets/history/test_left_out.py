"""The record of samples that a run has passed over."""

from __future__ import annotations

import pytest

from megatron.core.datasets.data_history import LeftOut, SkippedSamples, recorded_history
from megatron.core.errors import DataError

FIRST = LeftOut(start=40, end=48, iteration=6, reason="sample 43", samples=(43,))
SECOND = LeftOut(start=8, end=12, iteration=3, reason="--iterations-to-skip")


def test_a_step_meets_what_overlaps_it() -> None:
    record = SkippedSamples().with_step(FIRST).with_step(SECOND)
    assert record.meeting(47, 50) is FIRST
    assert record.meeting(0, 9) is SECOND
    assert record.meeting(12, 40) is None
    assert record.meeting(48, 56) is None


def test_the_same_samples_are_recorded_once() -> None:
    again = LeftOut(start=40, end=48, iteration=6, reason="again")
    assert SkippedSamples((FIRST, SECOND)).with_step(again).steps == (SECOND, again)


def test_a_record_is_read_back_from_beside_a_history() -> None:
    record = SkippedSamples((FIRST,)).with_rewind().with_step(SECOND)
    assert record.num_rewound == 1
    assert SkippedSamples.from_dict({"phases": [], **record.to_dict()}) == record
    assert SkippedSamples.from_dict(None) == SkippedSamples.from_dict({"phases": []}) == SkippedSamples()
    assert SkippedSamples().to_dict() == {}
    assert recorded_history(record.to_dict()) is None
    assert recorded_history(SkippedSamples().with_rewind().to_dict()) is None


@pytest.mark.parametrize(
    "damage", [{"left_out": [{"start": 1}]}, {"left_out": 3}, {"left_out": ["x"]}, {"num_rewound": "x"}]
)
def test_a_damaged_record_is_refused(damage: dict[str, object]) -> None:
    with pytest.raises(DataError, match="record of the samples left out is damaged"):
        SkippedSamples.from_dict(damage)
