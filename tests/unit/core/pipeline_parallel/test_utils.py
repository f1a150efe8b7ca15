"""Positions of stages in a pipeline, and megatron-core's order of passes."""

from __future__ import annotations

import pytest

from megatron.core.pipeline_parallel.schedules import get_schedule_table
from megatron.core.pipeline_parallel.utils import (
    get_pp_first_rank,
    get_pp_last_rank,
    get_pp_next_rank,
    get_pp_prev_rank,
    is_pp_first_stage,
    is_pp_last_stage,
    is_vp_first_stage,
    is_vp_last_stage,
)
from megatron.core.process_group import Group
from megatron.core.transformer.cuda_graphs import convert_schedule_table_to_order


def test_positions_of_pipeline_ranks() -> None:
    first, middle, last = (Group(("pp",), (1, 4, 7), rank) for rank in range(3))
    assert [is_pp_first_stage(pp) for pp in (first, middle, last)] == [True, False, False]
    assert [is_pp_last_stage(pp) for pp in (first, middle, last)] == [False, False, True]
    assert (get_pp_first_rank(middle), get_pp_last_rank(middle)) == (1, 7)
    assert [get_pp_prev_rank(pp) for pp in (first, middle, last)] == [None, 1, 4]
    assert [get_pp_next_rank(pp) for pp in (first, middle, last)] == [4, 7, None]


def test_positions_of_virtual_stages() -> None:
    assert [is_vp_first_stage(stage, 3) for stage in range(3)] == [True, False, False]
    assert [is_vp_last_stage(stage, 3) for stage in range(3)] == [False, False, True]
    assert is_vp_first_stage(None, None)
    assert is_vp_last_stage(0, 1)
    with pytest.raises(AssertionError, match="vp_stage is 2"):
        is_vp_last_stage(2, 1)


def test_order_has_warmup_then_pairs_then_cooldown() -> None:
    table = get_schedule_table(3, 2, 2)
    assert convert_schedule_table_to_order(3, 2, table) == [1, 1, 2, 2, -2, 1, -2, 2, -1, -1, -2, -1]
    assert convert_schedule_table_to_order(0, 1, get_schedule_table(2, 1, 2)) == [1, -1, 1, -1]
