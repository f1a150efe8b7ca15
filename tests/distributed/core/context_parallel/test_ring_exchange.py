"""Sends round a ring of ranks: who receives what, two at a time, larger than any buffer in between."""

from __future__ import annotations

import pytest
import torch

from megatron.core.collectives import all_to_all_first_dim, start_ring_exchange
from megatron.core.model_parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import single_rank_group
from tests.harness.distributed import run_distributed

LARGE = 1_000_000


def exchange_twice_at_once(numel: int) -> tuple[set[float], set[float]]:
    """Start a float32 and a float64 exchange before waiting for either, in the two halves of the world apart."""
    cp = create_parallel_state(ParallelSizes(cp=2)).cp
    rank = cp.ranks[cp.rank]
    first = start_ring_exchange(torch.full((numel,), float(rank)), cp)
    second = start_ring_exchange(torch.full((numel // 2,), rank + 0.5, dtype=torch.float64), cp)
    return set(first.wait().unique().tolist()), set(second.wait().unique().tolist())


@pytest.mark.parametrize("numel", [10, LARGE])
def test_every_rank_receives_from_the_one_before_it(numel: int) -> None:
    received = run_distributed(4, exchange_twice_at_once, numel)
    assert received == [({float(rank)}, {rank + 0.5}) for rank in (1, 0, 3, 2)]


def go_round() -> list[float]:
    """Return what a rank holds after each hop of its neighbors' tensors."""
    cp = create_parallel_state(ParallelSizes(cp=4)).cp
    tensor, seen = torch.tensor([float(cp.rank)]), []
    for _ in range(cp.size):
        tensor = start_ring_exchange(tensor, cp).wait()
        seen.append(tensor.item())
    return seen


def test_tensors_are_home_after_as_many_hops_as_ranks() -> None:
    assert run_distributed(4, go_round) == [[3, 2, 1, 0], [0, 3, 2, 1], [1, 0, 3, 2], [2, 1, 0, 3]]


def swap_rows() -> list[list[float]]:
    cp = create_parallel_state(ParallelSizes(cp=3)).cp
    rows = torch.arange(3.0)[:, None] * 10 + cp.rank * torch.ones(2)
    return all_to_all_first_dim(rows, cp).tolist()


def test_row_i_goes_to_rank_i() -> None:
    assert run_distributed(3, swap_rows) == [[[10.0 * rank + source] * 2 for source in range(3)] for rank in range(3)]


def test_one_rank_keeps_its_tensor() -> None:
    tensor, alone = torch.ones(1, 2), single_rank_group(("cp",))
    assert start_ring_exchange(tensor, alone).wait() is tensor
    assert all_to_all_first_dim(tensor, alone) is tensor
