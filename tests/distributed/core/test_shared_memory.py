"""Collectives through shared memory against sums in one process and against gloo."""

from __future__ import annotations

import errno
import gc
import os
import socket
import threading
import time
import weakref
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path
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
    results = []
    for context in (shared_memory.without_shared_memory(), nullcontext()):
        with context:
            tensor, shard = values(group.rank, 998, dtype), torch.empty(499, dtype=dtype)
            collectives.reduce_scatter_into(shard, tensor, group)
            collectives.all_reduce(tensor, group)
        results.append(torch.cat([tensor, shard]))
        # Without shared memory the ranks are not connected.
        assert len(shared_memory._memories) == len(results) - 1
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_ranks_compute_the_bits_of_gloo(dtype: torch.dtype) -> None:
    run_distributed(2, compare_with_gloo, dtype)


def shard_asynchronously() -> None:
    group = world()
    everyone = [values(rank, 12, torch.float32) for rank in range(group.size)]
    own, total = everyone[group.rank], added(everyone)
    shard, whole = torch.empty(4), torch.empty(12 * group.size)
    works = [
        collectives.reduce_scatter_into(shard, own, group, async_op=True),
        collectives.all_gather_into(whole, own, group, async_op=True),
    ]
    for work in works:
        assert work is not None
        work.wait()
    assert torch.equal(shard, total.chunk(group.size)[group.rank])
    assert torch.equal(whole, torch.cat(everyone))


def test_gradients_and_parameters_are_exchanged_asynchronously() -> None:
    run_distributed(3, shard_asynchronously)


def gather_in_another_order() -> list[float]:
    """Return a gathered tensor; the group lists its ranks in another order than its communicator."""
    handle = dist.new_group([0, 1])
    group = Group(("tp",), (1, 0), 1 - dist.get_rank(), handle)
    whole = torch.empty(2)
    collectives.all_gather_into(whole, torch.tensor([float(dist.get_rank())]), group)
    assert shared_memory._memories[handle] is not None
    return whole.tolist()


def test_the_order_of_ranks_is_that_of_the_communicator() -> None:
    assert run_distributed(2, gather_in_another_order) == [[0.0, 1.0], [0.0, 1.0]]


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
    # The first rank to notice closes its own connections, so the other one may notice these.
    named = "Connection closed by rank 1 of ranks 0-2"
    assert named in (first, third)
    assert {first, third} <= {named, *(f"Connection closed by rank {rank} of ranks 0-2" for rank in (0, 2))}


def wait_in_vain(is_given_up: bool) -> str:
    """Return the error of a rank whose wait ends after the timeout, or when another thread gives up."""
    recorder = FlightRecorder()
    group = world(recorder)
    collectives.all_reduce(torch.ones(4), group)
    memory = shared_memory._memories[group.handle]
    assert memory is not None
    message = ""
    if group.rank == 0:
        if is_given_up:
            threading.Timer(0.3, recorder.give_up).start()
        else:
            memory._timeout_s = 0.3
        with pytest.raises(GivenUpError if is_given_up else dist.DistNetworkError) as caught:
            collectives.all_reduce(torch.ones(4), group)
        message = str(caught.value)
    dist.barrier()
    return message


def test_a_wait_ends_after_the_timeout() -> None:
    message, _ = run_distributed(2, wait_in_vain, is_given_up=False)
    assert message.startswith("rank 1 has not taken part in a collective of ranks 0,1 within 0.3 s; ")


def test_a_wait_ends_when_communication_is_given_up() -> None:
    message, _ = run_distributed(2, wait_in_vain, is_given_up=True)
    assert "communication was aborted" in message


def collect_after_a_timeout() -> list[str]:
    """Return the errors of two collectives. Rank 0 leaves the first one after a timeout."""
    group = world()
    collectives.all_reduce(torch.ones(4), group)
    memory = shared_memory._memories[group.handle]
    assert memory is not None
    errors = []
    if group.rank == 0:
        memory._timeout_s = 0.3
    else:
        dist.recv(torch.empty(1), 0)
    for _ in range(2):
        with pytest.raises(dist.DistNetworkError) as caught:
            collectives.all_reduce(torch.ones(40), group)
        errors.append(str(caught.value))
        if group.rank == 0 and len(errors) == 1:
            dist.send(torch.zeros(1), 1)
    return errors


def test_no_rank_uses_a_memory_that_has_failed() -> None:
    # Without an error rank 1 would take the first piece of rank 0's second collective for the next of its first.
    (first, second), late = run_distributed(2, collect_after_a_timeout)
    assert "within 0.3 s" in first
    assert second == "Connection closed: an earlier collective of ranks 0,1 has failed"
    assert late == ["Connection closed by rank 0 of ranks 0,1", second]


def interrupt_between_pieces() -> list[str]:
    """Return the errors of two collectives. Rank 0 is interrupted after the first piece of the first one."""
    group = world()
    collectives.all_reduce(torch.ones(4), group)
    errors = []
    add = patch.object(shared_memory, "_add", side_effect=KeyboardInterrupt())
    with pytest.raises((KeyboardInterrupt, dist.DistNetworkError)) as caught, add if group.rank == 0 else nullcontext():
        collectives.all_reduce(torch.ones(40), group)
    errors.append(f"{caught.type.__name__} {caught.value}")
    with pytest.raises(dist.DistNetworkError) as caught:
        collectives.all_reduce(torch.ones(4), group)
    return [*errors, str(caught.value)]


def test_an_interrupt_between_pieces_ends_the_collective_on_all_ranks() -> None:
    first, second = run_distributed(2, interrupt_between_pieces)
    failed = "Connection closed: an earlier collective of ranks 0,1 has failed"
    assert first == ["KeyboardInterrupt ", failed]
    assert second == ["DistNetworkError Connection closed by rank 0 of ranks 0,1", failed]


def reduce_different_sizes() -> str:
    group = world()
    with pytest.raises(dist.DistNetworkError) as caught:
        collectives.all_reduce(torch.ones(4 + group.rank), group)
    return str(caught.value)


def test_tensors_of_different_sizes_are_rejected() -> None:
    first, second = run_distributed(2, reduce_different_sizes)
    rule = "; a collective needs tensors of the same size on all ranks"
    messages = {
        f"rank 1 of ranks 0,1 exchanges 20 bytes and rank 0 16 bytes{rule}",
        f"rank 0 of ranks 0,1 exchanges 16 bytes and rank 1 20 bytes{rule}",
        "Connection closed by rank 0 of ranks 0,1",
        "Connection closed by rank 1 of ranks 0,1",
    }
    assert {first, second} <= messages
    assert any(rule in message for message in (first, second))


def gather_into_a_wrong_output() -> None:
    group = world()
    for output in (torch.empty(9), torch.empty(8, dtype=torch.float64)):
        with pytest.raises(AssertionError):
            collectives.all_gather_into(output, torch.ones(4), group)
        with pytest.raises(AssertionError):
            collectives.reduce_scatter_into(torch.ones(4), output, group)


def test_an_output_of_another_size_or_dtype_is_rejected() -> None:
    run_distributed(2, gather_into_a_wrong_output)


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
    assert fast > slow + 0.2


def reduce_values_with_gradients() -> None:
    group = world()
    leaf = torch.ones(40, requires_grad=True)
    saved = torch.full((40,), 2.0)
    with torch.device("meta"):
        for tensor in (leaf, leaf * 2, saved):
            total = (leaf * saved).sum()
            collectives.all_reduce(tensor, group)
            assert torch.equal(tensor, torch.full((40,), 4.0 if tensor is not leaf else 2.0, device="cpu"))
            total.backward()  # Like gloo, the collective does not count as a modification of a saved tensor.


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
    failure = patch(name, side_effect=error(errno.ENOMEM, "out of memory")) if group.rank == 1 else nullcontext()
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


def reduce_in_a_large_group() -> bool:
    group = world()
    shared_memory._MAX_RANKS = 2
    tensor = torch.ones(4)
    collectives.all_reduce(tensor, group)
    assert torch.equal(tensor, torch.full((4,), 3.0))
    return shared_memory._memories[group.handle] is None


def test_gloo_is_used_in_larger_groups() -> None:
    assert run_distributed(3, reduce_in_a_large_group) == [True] * 3


def reduce_beside_another_user() -> bool:
    """Reduce while rank 0 takes the other rank for a process of another user."""
    group = world()
    shared_memory._CONNECT_S = 0.5
    other = patch("os.getuid", return_value=os.getuid() + 1) if group.rank == 0 else nullcontext()
    tensor = torch.ones(4)
    with other:
        collectives.all_reduce(tensor, group)
    assert torch.equal(tensor, torch.full((4,), 2.0))
    return shared_memory._memories[group.handle] is None


def test_processes_of_other_users_get_no_memory() -> None:
    assert run_distributed(2, reduce_beside_another_user) == [True, True]


def links() -> list[str]:
    """Return the files, sockets and memories that this process has open or maps."""
    opened = []
    for path in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            opened.append(os.readlink(path))
    return opened


def destroy_a_group() -> None:
    handle = dist.new_group()
    memory = shared_memory.shared_memory_of(group_of(handle), torch.ones(1 << 15))
    assert memory is not None
    assert sum("memfd:megatron" in link for link in links()) == dist.get_world_size()
    peers, reference = list(memory._peers.values()), weakref.ref(memory)
    del memory
    dist.barrier()
    dist.destroy_process_group(handle)
    del handle
    gc.collect()
    assert reference() is None
    assert [peer.fileno() for peer in peers] == [-1] * len(peers)
    assert not any("memfd:megatron" in link for link in links())


def test_nothing_is_open_after_a_group_is_destroyed() -> None:
    run_distributed(3, destroy_a_group)
