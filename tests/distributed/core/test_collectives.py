"""Collectives against what the same sums and joins give in one process."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch

from megatron.core import collectives
from megatron.core.errors import DataError
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state
from megatron.core.process_group import Group
from tests.harness.distributed import run_distributed


def tensor_of(rank: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(36, dtype=dtype).reshape(6, 2, 3) * (rank + 1) - rank**2


def transposed(tensor: torch.Tensor) -> torch.Tensor:
    """Return the same values in memory that is not contiguous."""
    return tensor.transpose(0, 2).contiguous().transpose(0, 2)


def every_collective() -> dict[str, Any]:
    world: Group = create_parallel_state(ParallelSizes(tp=3)).tp
    mine = tensor_of(world.rank)
    summed = mine.clone()
    assert collectives.all_reduce(summed, world) is None
    largest = mine.clone()
    work = collectives.all_reduce(largest, world, op="max", async_op=True)
    assert work is not None
    work.wait()
    flat = torch.empty(3 * 36)
    work = collectives.all_gather_into(flat, mine.view(-1), world, async_op=True)
    assert work is not None
    work.wait()
    average = torch.empty(12)
    collectives.reduce_scatter_into(average, mine.view(-1), world, op="avg")
    copied = mine.clone()
    collectives.broadcast(copied, world, source=2)
    collectives.barrier(world)
    return {
        "summed": summed,
        "largest": largest,
        "flat": flat,
        "average": average,
        "copied": copied,
        "gathered_first": collectives.all_gather_first_dim(transposed(mine), world),
        "scattered": collectives.reduce_scatter_first_dim(transposed(mine), world),
        "gathered_last": collectives.all_gather_last_dim(transposed(mine), world),
        "object": collectives.broadcast_object({"from": world.rank}, world, source=1),
        "objects": collectives.all_gather_objects(world.rank * 11, world),
        "gathered_vector": collectives.all_gather_last_dim(mine[0, 0], world),
    }


def test_collectives_over_three_ranks() -> None:
    tensors = [tensor_of(rank) for rank in range(3)]
    total = torch.stack(tensors).sum(dim=0)
    for rank, result in enumerate(run_distributed(3, every_collective)):
        expected = {
            "summed": total,
            "largest": torch.stack(tensors).amax(dim=0),
            "flat": torch.cat([tensor.view(-1) for tensor in tensors]),
            "average": total.view(-1)[rank * 12 : (rank + 1) * 12] / 3,
            "copied": tensors[2],
            "gathered_first": torch.cat(tensors),
            "scattered": total[2 * rank : 2 * rank + 2],
            "gathered_last": torch.cat(tensors, dim=-1),
            "gathered_vector": torch.cat([tensor[0, 0] for tensor in tensors]),
        }
        for name, tensor in expected.items():
            torch.testing.assert_close(result[name], tensor, msg=name)
        assert result["object"] == {"from": 1}
        assert result["objects"] == [0, 11, 22]


def summed_in(dtype: torch.dtype) -> torch.Tensor:
    world = create_parallel_state(ParallelSizes(tp=2)).tp
    tensor = tensor_of(world.rank, dtype)
    collectives.all_reduce(tensor, world)
    part = collectives.reduce_scatter_first_dim(tensor_of(world.rank, dtype), world)
    assert torch.equal(part, tensor[3 * world.rank : 3 * world.rank + 3])
    return tensor


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_every_number_format_is_summed(dtype: torch.dtype) -> None:
    for result in run_distributed(2, summed_in, dtype):
        assert result.dtype == dtype
        assert torch.equal(result, tensor_of(0, dtype) + tensor_of(1, dtype))


def decide_together() -> tuple[list[Any], list[bool], str, int]:
    world = create_parallel_state().world
    gathered = collectives.gather_objects(world.rank * 11, world)
    flags = [collectives.any_rank(world.rank in ranks, world) for ranks in ((), (1,), (0, 2))]

    def act(failing: tuple[int, ...]) -> int:
        if world.rank in failing:
            raise DataError(f"rank {world.rank} cannot")
        return world.rank

    try:
        collectives.run_on_all_ranks(lambda: act((1, 2)), world)
    except DataError as error:
        return gathered, flags, str(error), collectives.run_on_all_ranks(lambda: act(()), world)
    raise AssertionError("nothing was raised")


def test_ranks_decide_and_fail_together() -> None:
    flags, error = [False, True, True], "rank 1 cannot"
    assert run_distributed(3, decide_together) == [
        ([0, 11, 22], flags, error, 0),
        ([], flags, error, 1),
        ([], flags, error, 2),
    ]


def bytes_around_a_ring(sizes: tuple[int, ...]) -> torch.Tensor:
    """Send bytes to the next rank, in pieces of seven, and return those of the rank before."""
    world = create_parallel_state().world
    previous = (world.rank - 1) % world.size
    sent = torch.arange(sizes[world.rank], dtype=torch.uint8) + 100 * world.rank
    received = torch.zeros(sizes[previous], dtype=torch.uint8)
    with patch.object(collectives, "_PIECE_BYTES", 7):
        collectives.exchange_bytes(sent, (world.rank + 1) % world.size, received, previous, world, torch.device("cpu"))
    return received


def test_bytes_of_unlike_lengths_go_around_a_ring() -> None:
    """A rank sends fewer pieces than it receives, or more."""
    sizes = (5, 23, 14)
    received = run_distributed(3, bytes_around_a_ring, sizes)
    for rank, found in enumerate(received):
        previous = (rank - 1) % 3
        assert torch.equal(found, torch.arange(sizes[previous], dtype=torch.uint8) + 100 * previous)
