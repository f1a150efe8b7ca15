"""Collectives through shared memory against sums in one process and against gloo."""

from __future__ import annotations

import errno
import gc
import os
import socket
import time
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from megatron.core import collectives, shared_memory
from megatron.core.flight_recorder import FlightRecorder, GivenUpError
from megatron.core.parallel_state import record_flight
from megatron.core.process_group import Group
from tests.harness.distributed import run_distributed

COLUMNS = (1, 5, 16, 17, 48, 49)
"""Numbers of elements around the ends of pieces, which have 16 of float32 in an all-reduce of the tests."""


def world(recorder: FlightRecorder | None = None) -> Group:
    """Return the group of all ranks, each of whose slots has 64 bytes."""
    shared_memory._SLOT_BYTES = 64
    return record_flight(group_of(dist.group.WORLD), recorder)


def group_of(handle: dist.ProcessGroup) -> Group:
    return Group(("tp",), tuple(range(dist.get_world_size())), dist.get_rank(), handle)


def values(rank: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * rank + count)
    return (torch.randn(count, generator=generator, dtype=torch.float64) * 50).to(dtype)


def added(tensors: list[torch.Tensor]) -> torch.Tensor:
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def compare_with_sums(dtype: torch.dtype) -> int:
    """Compare each collective with tensors of all ranks, bit for bit; return the number of written pieces."""
    group = world()
    for count in COLUMNS:
        everyone = [values(rank, count * group.size, dtype) for rank in range(group.size)]
        own, total = everyone[group.rank], added(everyone)
        summed = own.clone().view(count, group.size)
        assert collectives.all_reduce(summed, group) is None
        assert torch.equal(summed.view(-1), total)
        gathered = torch.empty(group.size * own.numel(), dtype=dtype)
        collectives.all_gather_into(gathered, own, group)
        assert torch.equal(gathered, torch.cat(everyone))
        scattered = torch.empty(count, dtype=dtype)
        collectives.reduce_scatter_into(scattered, own, group)
        assert torch.equal(scattered, total.chunk(group.size)[group.rank])
        # In place: a rank's shard is part of the whole tensor.
        whole = own.clone()
        collectives.reduce_scatter_into(whole.chunk(group.size)[group.rank], whole, group)
        assert torch.equal(whole.chunk(group.size)[group.rank], total.chunk(group.size)[group.rank])
        collectives.all_gather_into(whole, whole.chunk(group.size)[group.rank], group)
        assert torch.equal(whole, total)
    memory = shared_memory._memories[group.handle]
    assert memory is not None
    return memory._num_written


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64], ids=str)
def test_collectives_have_the_bits_of_sums_in_the_order_of_ranks(world_size: int, dtype: torch.dtype) -> None:
    numbers = run_distributed(world_size, compare_with_sums, dtype)
    assert len(set(numbers)) == 1
    assert numbers[0] > 5 * len(COLUMNS)


def compare_with_gloo(dtype: torch.dtype) -> None:
    group = world()
    ours, by_gloo = values(group.rank, 999, dtype), values(group.rank, 999, dtype)
    collectives.all_reduce(ours, group)
    dist.all_reduce(by_gloo)
    assert torch.equal(ours, by_gloo)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_compute_the_bits_of_gloo(dtype: torch.dtype) -> None:
    run_distributed(2, compare_with_gloo, dtype)


def start_several() -> None:
    """Start collectives before earlier ones are waited for."""
    group = world()
    expected = [added([values(rank, count, torch.float32) for rank in range(group.size)]) for count in (3, 15, 40, 2)]
    tensors = [values(group.rank, len(each), torch.float32) for each in expected]
    works = [collectives.all_reduce(tensor, group, async_op=True) for tensor in tensors]
    memory = shared_memory._memories[group.handle]
    # The third has three pieces, which are exchanged when it is started.
    assert memory is not None
    assert memory._num_written == 1 + 1 + 3 + 1
    time.sleep(0.05 * group.rank)
    largest = torch.tensor([float(group.rank)])
    collectives.all_reduce(largest, group, op="max")
    assert largest.item() == group.size - 1
    for work in (works[3], works[0], works[1], works[2], works[0]):
        assert work is not None
        work.wait()
    for tensor, total in zip(tensors, expected):
        assert torch.equal(tensor, total)


def test_asynchronous_collectives_are_waited_for_in_any_order() -> None:
    run_distributed(3, start_several)


def lose_a_rank() -> str:
    group = world()
    collectives.all_reduce(torch.ones(4), group)
    if group.rank == 1:
        memory = shared_memory._memories[group.handle]
        assert memory is not None
        for peer in memory._peers.values():
            peer.shutdown(socket.SHUT_RDWR)
        return ""
    with pytest.raises(dist.DistNetworkError) as caught:
        collectives.all_reduce(torch.ones(4), group)
    return str(caught.value)


def test_a_lost_rank_is_named() -> None:
    first, _, third = run_distributed(3, lose_a_rank)
    assert first == "Connection closed by rank 1 of group tp (ranks 0-2)"
    assert third.startswith("Connection closed by rank")


def wait_in_vain(is_given_up: bool) -> str:
    recorder = FlightRecorder()
    group = world(recorder)
    collectives.all_reduce(torch.ones(4), group)
    memory = shared_memory._memories[group.handle]
    assert memory is not None
    message = ""
    if group.rank == 0:
        if is_given_up:
            recorder.give_up()
        else:
            memory._timeout_s = 0.3
        with pytest.raises(GivenUpError if is_given_up else dist.DistNetworkError) as caught:
            collectives.all_reduce(torch.ones(4), group)
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_wait_ends_after_the_timeout() -> None:
    message, _ = run_distributed(2, wait_in_vain, is_given_up=False)
    assert message.startswith("rank 1 has not taken part in a collective of group tp (ranks 0,1) within 0.3 s; ")


def test_a_wait_ends_when_communication_is_given_up() -> None:
    message, _ = run_distributed(2, wait_in_vain, is_given_up=True)
    assert "communication was aborted" in message


def collect_after_a_timeout() -> list[str]:
    """Return the errors of collectives from one on that rank 0 has left after a timeout."""
    group = world()
    collectives.all_reduce(torch.ones(4), group)
    memory = shared_memory._memories[group.handle]
    assert memory is not None
    if group.rank == 0:
        memory._timeout_s = 0.3
    else:
        time.sleep(1.0)
    errors = []
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError) as caught:
            collectives.all_reduce(torch.ones(40), group)
        errors.append(str(caught.value))
    dist.barrier()
    return errors


def test_no_rank_uses_a_memory_that_has_failed() -> None:
    (first, second), late = run_distributed(2, collect_after_a_timeout)
    assert "within 0.3 s" in first
    assert second == "Connection closed: an earlier collective of group tp (ranks 0,1) has failed"
    assert late == ["Connection closed by rank 0 of group tp (ranks 0,1)", second]


def wait_for_a_slow_rank() -> float:
    """Return the seconds that a rank waited, of which it spent a part in starting the second collective."""
    recorder = FlightRecorder()
    group = world(recorder)
    collectives.all_reduce(torch.ones(4), group)
    recorder.waited_s = 0.0
    if group.rank == 1:
        time.sleep(0.5)
    works = [collectives.all_reduce(torch.ones(4), group, async_op=True) for _ in range(2)]
    for work in works:
        assert work is not None
        work.wait()
    return recorder.waited_s


def test_a_wait_for_the_collective_in_flight_is_recorded() -> None:
    fast, slow = run_distributed(2, wait_for_a_slow_rank)
    assert fast > 0.4
    assert slow < 0.3


def reduce_values_with_gradients() -> None:
    group = world()
    with torch.device("meta"):
        tensor = torch.ones(40, device="cpu", requires_grad=True) * 2
        collectives.all_reduce(tensor, group)
    assert torch.equal(tensor, torch.full((40,), 4.0, device="cpu"))


def test_tensors_may_require_gradients_and_another_device_be_the_default() -> None:
    run_distributed(2, reduce_values_with_gradients)


def timeout_of_the_group() -> float:
    handle = dist.new_group(timeout=timedelta(seconds=77))
    memory = shared_memory.shared_memory_of(group_of(handle), torch.ones(1 << 15))
    assert memory is not None
    return memory._timeout_s


def test_waits_have_the_timeout_of_the_process_group() -> None:
    assert run_distributed(2, timeout_of_the_group) == [77.0, 77.0]


def reduce_without(name: str, error: type[Exception]) -> bool:
    """Reduce while one function fails on rank 1; return whether gloo was used."""
    group = world()
    tensor = values(group.rank, 40, torch.float32)
    failure = patch(name, side_effect=error(errno.ENOMEM, "out of memory")) if group.rank == 1 else patch.dict({})
    with failure:
        collectives.all_reduce(tensor, group)
    torch.testing.assert_close(tensor, added([values(rank, 40, torch.float32) for rank in range(group.size)]))
    return shared_memory._memories[group.handle] is None


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("os.memfd_create", OSError),
        ("socket.send_fds", OSError),
        ("mmap.mmap", OSError),
        ("megatron.core.shared_memory._accept", PermissionError),
    ],
)
def test_gloo_is_used_if_a_rank_cannot_share_memory(name: str, error: type[Exception]) -> None:
    assert run_distributed(3, reduce_without, name, error) == [True, True, True]


def reduce_as_on_two_nodes() -> bool:
    """Reduce while the ranks cannot reach each other's sockets, as on several nodes."""
    group = world()
    with patch.object(shared_memory, "_call", side_effect=ConnectionRefusedError()):
        tensor = torch.ones(40)
        collectives.all_reduce(tensor, group)
    assert torch.equal(tensor, torch.full((40,), float(group.size)))
    return shared_memory._memories[group.handle] is None


def test_gloo_is_used_between_nodes() -> None:
    assert run_distributed(2, reduce_as_on_two_nodes) == [True, True]


def open_files() -> tuple[int, int]:
    """Return the number of open files before a communicator has shared memory, and after it is destroyed."""
    handle = dist.new_group()
    before = len(os.listdir("/proc/self/fd"))
    assert shared_memory.shared_memory_of(group_of(handle), torch.ones(1 << 15)) is not None
    assert len(os.listdir("/proc/self/fd")) > before
    dist.barrier()
    dist.destroy_process_group(handle)
    del handle
    gc.collect()
    return before, len(os.listdir("/proc/self/fd"))


def test_connections_are_closed_with_the_group() -> None:
    for before, after in run_distributed(2, open_files):
        assert after <= before
