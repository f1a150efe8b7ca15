"""Communicators of the grid: one for each distinct set of ranks, none for a single rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.collectives import all_reduce
from megatron.core.errors import ConfigurationError
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import Communicators, create_parallel_state, make_groups
from tests.harness.distributed import run_distributed

NAMES = ("tp", "cp", "dp", "pp", "dp_cp", "model_parallel", "world")


def create_and_count(tp: int, pp: int, cp: int) -> dict[str, Any]:
    """Create the state; return the sets of ranks that got communicators and what a sum over each group gives."""
    made: list[tuple[int, ...]] = []
    new_group = dist.new_group

    def counting(*args: Any, **kwargs: Any) -> Any:
        made.append(tuple(kwargs["ranks"]))
        return new_group(*args, **kwargs)

    dist.new_group = counting
    try:
        state = create_parallel_state(ParallelSizes(tp=tp, pp=pp, cp=cp))
    finally:
        dist.new_group = new_group
    groups = {name: getattr(state, name) for name in NAMES}
    sums = {}
    for name, group in groups.items():
        value = torch.tensor([10.0 ** dist.get_rank()])
        all_reduce(value, group)
        sums[name] = int(value.item())
    handles: dict[tuple[int, ...], set[int]] = {}
    for group in groups.values():
        handles.setdefault(group.ranks, set()).add(id(group.handle))
    return {
        "made": made,
        "sums": sums,
        "ranks": {name: group.ranks for name, group in groups.items()},
        "silent": [name for name, group in groups.items() if group.handle is None],
        "handles_a_set": {len(ids) for ids in handles.values()},
    }


@pytest.mark.default(4)
@pytest.mark.parametrize(
    ("tp", "pp", "cp", "made_by_rank_1"),
    [
        (4, 1, 1, []),
        (1, 1, 1, []),
        (2, 1, 1, [(0, 1), (1, 3)]),
        (2, 2, 1, [(0, 1), (1, 3)]),
        (1, 2, 1, [(0, 1), (1, 3)]),
        (2, 1, 2, [(0, 1), (1, 3)]),
    ],
)
def test_one_communicator_for_each_set_of_ranks(
    tp: int, pp: int, cp: int, made_by_rank_1: list[tuple[int, ...]]
) -> None:
    results = run_distributed(4, create_and_count, tp, pp, cp)
    assert sorted(results[1]["made"]) == made_by_rank_1
    for rank, result in enumerate(results):
        assert len(set(result["made"])) == len(result["made"])
        assert result["handles_a_set"] == {1}
        assert all(rank in ranks for ranks in result["made"])
        for name, ranks in result["ranks"].items():
            assert (name in result["silent"]) == (len(ranks) == 1)
            assert result["sums"][name] == sum(10**member for member in ranks)


def create_two_factorizations(tp: int) -> dict[str, Any]:
    """Make the groups of both grids over the same ranks; return what a sum over each gives, and what was shared."""
    rank, communicators = dist.get_rank(), Communicators()
    dense = make_groups(rank, ParallelSizes(tp=tp).in_world(4).grid, {"dp": ("dp",), "tp": ("tp",)}, communicators)
    experts = {"pp": 1, "edp": 2, "ep": 2, "etp": 1}
    axes = {"edp": ("edp",), "ep": ("ep",), "etp": ("etp",), "all": ("edp", "ep")}
    groups = dense | make_groups(rank, experts, axes, communicators)
    sums = {}
    for name, group in groups.items():
        value = torch.tensor([10.0**rank])
        all_reduce(value, group)
        sums[name] = int(value.item())
    return {
        "sums": sums,
        "ranks": {name: group.ranks for name, group in groups.items()},
        "shared": [name for name in ("ep", "edp") if any(groups[name].handle is d.handle for d in dense.values())],
        "whole": groups["all"].handle is dist.group.WORLD,
        "silent": groups["etp"].handle is None,
    }


@pytest.mark.parametrize(("tp", "shared"), [(1, []), (2, ["ep", "edp"])])
def test_a_second_factorization_of_the_same_ranks_shares_the_communicators_that_are_equal(
    tp: int, shared: list[str]
) -> None:
    for rank, result in enumerate(run_distributed(4, create_two_factorizations, tp)):
        row, column = rank // 2 * 2, rank % 2
        experts = {"ep": (row, row + 1), "edp": (column, column + 2), "etp": (rank,), "all": (0, 1, 2, 3)}
        dense = {"tp": (row, row + 1), "dp": (column, column + 2)} if tp == 2 else {"tp": (rank,), "dp": (0, 1, 2, 3)}
        assert result["ranks"] == dense | experts
        assert result["sums"] == {name: sum(10**r for r in ranks) for name, ranks in result["ranks"].items()}
        assert result["shared"] == shared
        assert result["whole"]
        assert result["silent"]


def refused() -> str:
    with pytest.raises(ConfigurationError) as caught:
        create_parallel_state(ParallelSizes(tp=3))
    return str(caught.value)


def test_world_that_does_not_factor_is_refused_on_every_rank() -> None:
    messages = run_distributed(2, refused)
    assert all(message.startswith("world size 2 is not divisible by tensor(3)") for message in messages)
