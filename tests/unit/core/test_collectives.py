"""Collectives over one rank return at once, and never pretend over ranks that nobody can reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megatron.core import collectives
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import describe_parallel_state
from megatron.core.process_group import Group, single_rank_group

ALONE = single_rank_group()
DESCRIBED = describe_parallel_state(1, 6, ParallelSizes(tp=3)).tp


def test_one_rank_keeps_its_values() -> None:
    tensor = torch.randn(4, 3, 2)
    expected = tensor.clone()
    assert collectives.all_reduce(tensor, ALONE) is None
    assert collectives.all_reduce(tensor, ALONE, op="max", async_op=True) is None
    assert collectives.broadcast(tensor, ALONE) is None
    assert torch.equal(tensor, expected)
    for function in (
        collectives.all_gather_first_dim,
        collectives.reduce_scatter_first_dim,
        collectives.all_gather_last_dim,
    ):
        assert function(tensor, ALONE) is tensor
    for function in (collectives.all_gather_into, collectives.reduce_scatter_into):
        output = torch.empty(24)
        assert function(output, tensor.view(-1), ALONE) is None
        assert torch.equal(output, expected.view(-1))
    assert collectives.broadcast_object({"a": 1}, ALONE) == {"a": 1}
    assert collectives.all_gather_objects("x", ALONE) == ["x"]
    assert collectives.gather_objects("x", ALONE) == ["x"]
    assert collectives.all_to_all_first_dim(tensor, ALONE) is tensor
    assert collectives.all_to_all_rows(tensor, [4], [4], ALONE) == (tensor, None)
    exchange = collectives.start_ring_exchange(tensor, ALONE)
    assert exchange.wait() is tensor
    assert [collectives.any_rank(flag, ALONE) for flag in (True, False)] == [True, False]
    assert collectives.run_on_all_ranks(lambda: "done", ALONE) == "done"
    collectives.barrier(ALONE)


def test_the_one_rank_of_a_group_is_its_first_and_its_last() -> None:
    assert (ALONE.ranks, ALONE.rank, ALONE.size, ALONE.name) == ((0,), 0, 1, "tp")
    assert (ALONE.is_first, ALONE.is_last) == (True, True)
    assert (DESCRIBED.ranks, DESCRIBED.is_first, DESCRIBED.is_last) == ((0, 1, 2), False, False)
    group = single_rank_group(("dp", "cp"), 5)
    assert (group.ranks, group.rank, group.name) == ((5,), 0, "dp_cp")


CALLS: dict[str, Callable[[torch.Tensor, Group], object]] = {
    "all_reduce": collectives.all_reduce,
    "all_gather_into": lambda tensor, group: collectives.all_gather_into(tensor.repeat(3), tensor, group),
    "reduce_scatter_into": lambda tensor, group: collectives.reduce_scatter_into(tensor, tensor.repeat(3), group),
    "all_gather_first_dim": collectives.all_gather_first_dim,
    "reduce_scatter_first_dim": collectives.reduce_scatter_first_dim,
    "all_gather_last_dim": collectives.all_gather_last_dim,
    "broadcast": collectives.broadcast,
    "broadcast_object": collectives.broadcast_object,
    "all_gather_objects": collectives.all_gather_objects,
    "gather_objects": collectives.gather_objects,
    "any_rank": lambda tensor, group: collectives.any_rank(True, group),
    "barrier": lambda tensor, group: collectives.barrier(group),
}


@pytest.mark.parametrize("name", CALLS)
def test_group_without_a_communicator_is_not_taken_for_one_rank(name: str) -> None:
    with pytest.raises(AssertionError, match="group tp is only described"):
        CALLS[name](torch.ones(6), DESCRIBED)
