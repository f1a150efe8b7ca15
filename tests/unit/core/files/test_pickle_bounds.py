"""Values whose parts are repeated: what a reader would walk through is bounded by the containers that there are."""

from __future__ import annotations

import pytest

from megatron.core.files.pickle_bounds import PickleBudget, check_value


class Record:
    arguments: tuple[object, ...] = ()
    attributes: tuple[object, ...] = ()


@pytest.mark.parametrize(("repeats", "is_rejected"), [(30, False), (60, True)])
def test_numbers_of_a_list_that_is_repeated_count_each_time(repeats: int, is_rejected: bool) -> None:
    value = [[*range(30_000)]] * repeats
    if is_rejected:
        with pytest.raises(ValueError, match="values repeat each other without end"):
            check_value(value, Record)
    else:
        check_value(value, Record)


def test_memory_is_bounded_by_what_was_read() -> None:
    """All of 600 MiB and 32 bytes for each byte of the pickle may be asked for, and no byte more."""
    budget = PickleBudget()
    budget.spend((600 << 20) + 32 * 1000, 1000)
    budget.spend(32, 1001)
    with pytest.raises(ValueError, match="its first 1001 bytes ask for 629177633 bytes of memory"):
        budget.spend(1, 1001)
