"""Ranks plan a save among replicas, keep the plan, and send the rest to the first rank alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.core.dist_checkpointing import save_plan
from megatron.core.dist_checkpointing.mapping import whole_tensor
from megatron.core.dist_checkpointing.save_plan import SavePlanner, gather_from_world
from megatron.core.errors import CheckpointError
from megatron.core.parallel_sizes import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from tests.harness.distributed import run_distributed
from tests.unit.core.dist_checkpointing.toy import toy_tensors


def gather(sizes: ParallelSizes) -> list[Any]:
    state = create_parallel_state(sizes)
    return gather_from_world(state.rank * 11, state)


@pytest.mark.default(2)
@pytest.mark.parametrize(("tp", "pp", "cp"), [(1, 1, 1), (2, 1, 2), (2, 2, 1), (1, 4, 2)])
def test_the_first_rank_gathers_in_the_order_of_the_ranks(tp: int, pp: int, cp: int) -> None:
    first, *others = run_distributed(8, gather, ParallelSizes(tp=tp, pp=pp, cp=cp))
    assert first == [rank * 11 for rank in range(8)]
    assert others == [[]] * 7


def plan_three_times() -> list[tuple[int, list[int], int]]:
    """Plan at TP 2 and DP 2: twice the same, then with one more tensor on the first two ranks."""
    state = create_parallel_state(ParallelSizes(tp=2))
    groups: list[int] = []
    real = save_plan.all_gather_objects

    def counting(value: Any, group: Any) -> list[Any]:
        groups.append(group.size)
        return real(value, group)

    save_plan.all_gather_objects = counting  # type: ignore[attr-defined]
    planner = SavePlanner(state)
    tensors = toy_tensors(state.tp.rank, 2)
    found, plans = [], []
    for more in (0, 0, 1):
        groups.clear()
        if more and state.rank < 2:
            tensors.append(whole_tensor(f"model.more{state.tp.rank}", torch.ones(3)))
        plans.append(planner.plan(tensors))
        own = sum(box.num_elements for tensor in plans[-1].own for box in tensor.boxes)
        found.append((own, list(groups), len(plans[-1].ranks)))
    assert plans[0] is plans[1]
    return found


def test_a_plan_is_made_among_replicas_and_kept_while_nothing_changes() -> None:
    found = run_distributed(4, plan_three_times)
    total = 11 * 5 + 24 * 5 + 5 * 12 + 6 * 5 + 5
    for step, more in enumerate((0, 0, 1)):
        assert sum(rank[step][0] for rank in found) == total + 6 * more
        assert all(rank[step][1] == ([] if step == 1 else [2]) for rank in found)
        assert [rank[step][2] for rank in found] == [4, 0, 0, 0]


def plan_with_a_gap() -> str:
    state = create_parallel_state(ParallelSizes(tp=2))
    tensors = toy_tensors(state.tp.rank, 2)
    with pytest.raises(CheckpointError) as caught:
        SavePlanner(state).plan(tensors if state.tp.is_first else tensors[1:])
    return str(caught.value)


def test_a_gap_is_every_ranks_error() -> None:
    assert set(run_distributed(4, plan_with_a_gap)) == {
        "no rank holds model.embedding.weight[8:11,0:5]; nothing was saved"
    }
