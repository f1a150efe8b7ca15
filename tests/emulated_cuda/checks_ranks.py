"""Checks of what two ranks do together: NCCL and symmetric memory, each with a planted fault or without one.

Two processes run this file with pytest under torchrun, on emulated devices: see ``tests/unit/emulated_cuda``. A check
that leaves a communicator in pieces makes one of its own.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import threading
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from megatron.core.distributed.user_buffers import make_user_buffers
from megatron.core.parallel_config import ParallelSizes
from megatron.core.parallel_state import create_parallel_state, twin_group
from megatron.core.process_group import NcclOptions
from tests.emulated_cuda.activation import load_bindings

RANK = int(os.environ["RANK"])
PEER = 1 - RANK
SHORT = datetime.timedelta(seconds=10)
RACE = "emulated CUDA: race"
BETWEEN_RANKS = "emulated CUDA: race between ranks"


@pytest.fixture(scope="module", autouse=True)
def control() -> Iterator[dist.ProcessGroup]:
    """Start NCCL between both ranks; the group that this gives is gloo's, and orders hosts and no devices."""
    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", device_id=torch.device("cuda", RANK))
    group = dist.new_group(backend="gloo")
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def reports_are_expected(control: dist.ProcessGroup) -> Iterator[None]:
    """Let both ranks end a check together, and forget the reports of planted faults."""
    yield
    torch.cuda.synchronize()
    dist.barrier(group=control)
    load_bindings().clear_reports()


def assert_no_reports() -> None:
    torch.cuda.synchronize()
    assert load_bindings().reports() == []


def new_group() -> dist.ProcessGroup:
    group = dist.new_group([0, 1], timeout=SHORT)
    assert group is not None
    return group


def ones(count: int = 64, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(count, device="cuda", dtype=dtype)


# ---- NCCL


def test_a_group_has_the_options_of_the_configuration_file() -> None:
    options = {"dp_cp": NcclOptions(min_ctas=2, max_ctas=8)}
    state = create_parallel_state(ParallelSizes(), SHORT, nccl_options=options)
    assert state.dp_cp.handle is not state.dp.handle
    limits = []
    for group in (state.dp_cp, state.dp, twin_group(state.dp_cp)):
        assert group.handle is not None
        config = group.handle._get_backend(torch.device("cuda", RANK)).options.config
        limits.append((config.min_ctas, config.max_ctas))
    unset = -(2**31)
    assert limits == [(2, 8), (unset, unset), (2, 8)]
    x = ones()
    dist.all_reduce(x, group=state.dp_cp.handle)
    assert x.eq(2).all()
    assert_no_reports()


def test_user_buffers_are_in_a_registered_pool_of_their_own() -> None:
    state = create_parallel_state(ParallelSizes(), SHORT)
    buffers = make_user_buffers(state.dp, torch.device("cuda", RANK), is_symmetric=True)
    assert buffers is not None
    with buffers.allocating():
        x = ones()
    apart = ones()
    pools = [
        segment["segment_pool_id"]
        for y in (x, apart)
        for segment in torch.cuda.memory_snapshot()
        if segment["device"] == RANK and 0 <= y.data_ptr() - segment["address"] < segment["total_size"]
    ]
    assert pools == [buffers._pool.id, (0, 0)]
    dist.all_reduce(x, group=state.dp.handle)
    assert x.eq(2).all()
    with pytest.raises(RuntimeError, match="already registered"):
        buffers._backend.register_mem_pool(buffers._pool, True)
    backend, pool = buffers._backend, buffers._pool
    del buffers
    with pytest.raises(RuntimeError, match="not registered"):
        backend.deregister_mem_pool(pool)
    assert_no_reports()


def test_a_tensor_outlives_a_communication_that_no_stream_has_waited_for() -> None:
    x = ones(1 << 18)
    address = x.data_ptr()
    dist.all_reduce(x, async_op=True)
    del x
    assert ones(1 << 18).data_ptr() != address
    assert_no_reports()
    assert ones(1 << 18).data_ptr() == address


def test_memory_of_a_resized_storage_is_freed_during_a_communication() -> None:
    x = ones(1 << 18)
    dist.all_reduce(x, async_op=True)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="memory reused too early"):
        ones(1 << 18)


def test_an_average() -> None:
    x = ones() * (RANK + 1)
    dist.all_reduce(x, dist.ReduceOp.AVG)
    assert x.tolist() == [1.5] * 64
    part = torch.empty(32, device="cuda")
    dist.reduce_scatter_tensor(part, ones() * 3 * RANK, dist.ReduceOp.AVG)
    assert part.tolist() == [1.5] * 32
    assert_no_reports()


def test_collectives_in_place() -> None:
    whole = torch.full((64,), 1.0 + RANK, device="cuda")
    dist.all_gather_into_tensor(whole, whole[32 * RANK : 32 * RANK + 32])
    assert whole.tolist() == [1.0] * 32 + [2.0] * 32
    dist.reduce_scatter_tensor(whole[32 * RANK : 32 * RANK + 32], whole)
    assert whole[32 * RANK : 32 * RANK + 32].tolist() == [2.0 + 2.0 * RANK] * 32
    assert_no_reports()


def test_collectives_whose_tensors_overlap_out_of_place() -> None:
    whole, other = ones(), slice(32 * PEER, 32 * PEER + 32)
    for collective, output, tensor in (
        (dist.all_gather_into_tensor, whole, whole[other]),
        (dist.reduce_scatter_tensor, whole[other], whole),
        (dist.all_to_all_single, whole, whole),
    ):
        with pytest.raises(RuntimeError, match=f"{RACE}: the input and the output of .* overlap"):
            collective(output, tensor)
    assert_no_reports()


@pytest.mark.parametrize("waits", [True, False])
def test_work_of_a_communicator_is_waited_for_by_the_stream(waits: bool) -> None:
    x = ones()
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    if waits:
        work.wait()
        assert (x + 1).tolist() == [3.0] * 64
        assert_no_reports()
    else:
        with pytest.raises(RuntimeError, match=RACE):
            x.add_(1)
        work.wait()


def test_a_tensor_on_the_device_of_another_rank() -> None:
    tensor = torch.ones(4, device=torch.device("cuda", PEER))
    with pytest.raises(dist.DistBackendError, match="tensor not on device passed to init_process_group"):
        dist.all_reduce(tensor)


def test_coalesced_collectives() -> None:
    tensors = [ones() * (RANK + 1), ones(8) * (RANK + 2)]
    gathered = [torch.empty(2 * len(tensor), device="cuda") for tensor in tensors]
    with dist._coalescing_manager(device=torch.device("cuda", RANK), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    with pytest.raises(RuntimeError, match=RACE):
        tensors[1].sum()
    load_bindings().clear_reports()
    manager.wait()
    assert tensors[0].tolist() == [3.0] * 64
    assert tensors[1].tolist() == [5.0] * 8
    with dist._coalescing_manager(device=torch.device("cuda", RANK)):
        for into, tensor in zip(gathered, tensors):
            dist.all_gather_into_tensor(into, tensor)
    assert gathered[1].tolist() == [5.0] * 16
    assert_no_reports()


def test_messages_that_are_called_together() -> None:
    received = torch.empty(64, device="cuda")
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, ones() * RANK, PEER), dist.P2POp(dist.irecv, received, PEER)]
    )
    for work in works:
        work.wait()
    assert received.tolist() == [float(PEER)] * 64
    assert_no_reports()


def test_messages_of_other_sizes() -> None:
    group = new_group()
    received = torch.empty(32 if RANK else 64, device="cuda")
    with pytest.raises(RuntimeError, match=r"matching calls differ|NCCL timeout"):
        dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, ones(), PEER, group), dist.P2POp(dist.irecv, received, PEER, group)]
        )


def test_collectives_in_another_order() -> None:
    group = new_group()

    def call() -> None:
        if RANK:
            dist.all_reduce(ones(), group=group)
        else:
            dist.all_gather_into_tensor(torch.empty(128, device="cuda"), ones(), group=group)

    with pytest.raises(RuntimeError, match="matching calls differ"):
        call()


def test_another_reduction() -> None:
    group = new_group()
    with pytest.raises(RuntimeError, match="matching calls differ"):
        dist.all_reduce(ones(), dist.ReduceOp.SUM if RANK else dist.ReduceOp.MAX, group=group)


def test_dtypes_that_nccl_has_not() -> None:
    with pytest.raises(TypeError, match="not supported for NCCL"):
        dist.all_reduce(ones(dtype=torch.int16))


def test_a_rank_that_calls_nothing(control: dist.ProcessGroup) -> None:
    group = new_group()
    if RANK == 0:
        before = time.monotonic()
        with pytest.raises(RuntimeError, match="NCCL timeout"):
            dist.all_reduce(ones(), group=group)
        assert time.monotonic() - before > SHORT.total_seconds() / 2
    dist.barrier(group=control)


@pytest.mark.parametrize("both_send_first", [False, True])
def test_messages_are_not_buffered(both_send_first: bool) -> None:
    group = new_group()
    x, received = ones(), torch.empty(64, device="cuda")

    def exchange() -> None:
        if RANK == 0 or both_send_first:
            dist.send(x, PEER, group)
            dist.recv(received, PEER, group)
        else:
            dist.recv(received, PEER, group)
            dist.send(x, PEER, group)

    if both_send_first:
        with pytest.raises(RuntimeError, match="NCCL timeout"):
            exchange()
    else:
        exchange()
        assert received.tolist() == [1.0] * 64


def test_two_communicators_in_another_order() -> None:
    first, second = (new_group(), new_group())[:: 1 if RANK else -1]

    def call() -> None:
        dist.all_reduce(ones(), group=first, async_op=True)
        dist.all_reduce(ones(), group=second, async_op=True)

    with pytest.raises(RuntimeError, match="NCCL timeout"):
        call()


def test_a_group_that_is_split() -> None:
    group = dist.split_group(split_ranks=[[0, 1]])
    assert group is not None
    x = ones()
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0] * 64
    alone = dist.split_group(split_ranks=[[0], [1]])
    assert alone is not None
    dist.all_reduce(x, group=alone)
    assert x.tolist() == [2.0] * 64
    assert_no_reports()


def test_a_split_that_one_rank_does_not_join(control: dist.ProcessGroup) -> None:
    parent = new_group()
    if RANK == 0:
        with pytest.raises(RuntimeError, match="NCCL timeout"):
            dist.split_group(parent, split_ranks=[[0, 1]], timeout=SHORT)
    dist.barrier(group=control)


def test_an_abort_ends_what_waits(control: dist.ProcessGroup) -> None:
    group = new_group()
    x = ones()
    if RANK == 0:
        waiting = threading.Thread(target=lambda: dist.all_reduce(x, group=group, async_op=True))
        waiting.start()
        time.sleep(0.3)
        assert waiting.is_alive()
        group._get_backend(torch.device("cuda")).abort()
        waiting.join(SHORT.total_seconds())
        assert not waiting.is_alive()
        with pytest.raises(RuntimeError, match="NCCL communicator was aborted"):
            dist.all_reduce(x, group=group)
    dist.barrier(group=control)


def bytes_at(address: int, count: int = 64) -> set[int]:
    """Return the different bytes of memory that may be freed: emulated memory is the host's."""
    return set(ctypes.string_at(address, count))


def test_tensors_that_a_communication_holds() -> None:
    count = 3_000_000
    x = ones(count)
    work = dist.all_reduce(x, async_op=True)
    assert work is not None
    address = x.data_ptr()
    del x
    # The communication may still be under way: nobody is given its memory.
    other = torch.empty(count, device="cuda")
    assert other.data_ptr() != address
    assert bytes_at(address) != {0xFF}
    work.wait()
    del work, other
    torch.cuda.synchronize()
    assert bytes_at(address) == {0xFF}
    assert_no_reports()


def test_a_communication_that_nobody_waits_for_holds_its_memory() -> None:
    count = 3_000_000
    x = ones(count)
    address = x.data_ptr()
    dist.all_reduce(x, async_op=True)
    del x
    assert torch.empty(count, device="cuda").data_ptr() != address
    torch.cuda.synchronize()
    assert torch.empty(count, device="cuda").data_ptr() == address
    assert_no_reports()


def test_a_graph_with_a_collective() -> None:
    x = ones()
    dist.all_reduce(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = x * (RANK + 1)
        dist.all_reduce(y)
    graph.replay()
    assert y.tolist() == [6.0] * 64
    assert_no_reports()


# ---- symmetric memory


def symmetric(count: int = 64) -> tuple[torch.Tensor, symm_mem._SymmetricMemory]:
    tensor = symm_mem.empty(count, device=torch.device("cuda", RANK))
    handle = symm_mem.rendezvous(tensor, dist.group.WORLD.group_name)
    handle.barrier(channel=0)
    return tensor, handle


def test_ranks_read_what_others_have_written() -> None:
    mine, handle = symmetric()
    assert mine.isnan().all()
    handle.barrier(channel=0)
    mine.fill_(RANK + 1)
    handle.barrier(channel=0)
    assert handle.get_buffer(PEER, (64,), torch.float32).tolist() == [PEER + 1.0] * 64
    handle.barrier(channel=0)
    handle.get_buffer(PEER, (64,), torch.float32)[32:].fill_(7)
    handle.barrier(channel=0)
    assert mine.tolist() == [RANK + 1.0] * 32 + [7.0] * 32
    assert_no_reports()


def test_a_read_before_the_barrier(control: dist.ProcessGroup) -> None:
    mine, handle = symmetric()
    if RANK == 0:
        mine.fill_(1)
        torch.cuda.synchronize()
    # The hosts have an order. The devices have none.
    dist.barrier(group=control)
    if RANK == 1:
        with pytest.raises(RuntimeError, match=BETWEEN_RANKS) as caught:
            handle.get_buffer(0, (64,), torch.float32).sum()
        assert "aten::fill_" in str(caught.value)
    handle.barrier(channel=0)


def test_a_write_before_others_have_read(control: dist.ProcessGroup) -> None:
    mine, handle = symmetric()
    mine.fill_(1)
    handle.barrier(channel=0)
    if RANK == 1:
        handle.get_buffer(0, (64,), torch.float32)[:32].sum()
        torch.cuda.synchronize()
    dist.barrier(group=control)
    if RANK == 0:
        mine[32:].fill_(2)
        with pytest.raises(RuntimeError, match=BETWEEN_RANKS):
            mine.fill_(2)
    handle.barrier(channel=0)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_signal_orders_what_was_launched_before_it(is_early: bool, control: dist.ProcessGroup) -> None:
    mine, handle = symmetric()
    if RANK == 0:
        if is_early:
            handle.put_signal(1, channel=2)
        mine.fill_(5)
        if not is_early:
            handle.put_signal(1, channel=2)
    dist.barrier(group=control)
    if RANK == 1:
        handle.wait_signal(0, channel=2)
        theirs = handle.get_buffer(0, (64,), torch.float32)
        if is_early:
            with pytest.raises(RuntimeError, match=BETWEEN_RANKS):
                theirs.sum()
        else:
            assert theirs.tolist() == [5.0] * 64
            assert_no_reports()
    handle.barrier(channel=0)


@pytest.mark.parametrize("waits", [True, False])
def test_a_barrier_orders_the_stream_that_it_is_on(waits: bool, control: dist.ProcessGroup) -> None:
    mine, handle = symmetric()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        mine.fill_(RANK)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
    handle.barrier(channel=0)
    dist.barrier(group=control)
    theirs = handle.get_buffer(PEER, (64,), torch.float32)
    if waits:
        assert theirs.tolist() == [float(PEER)] * 64
        assert_no_reports()
    else:
        with pytest.raises(RuntimeError, match=BETWEEN_RANKS):
            theirs.sum()
    torch.cuda.synchronize()
    handle.barrier(channel=0)


def test_a_collective_orders_ranks_too() -> None:
    mine, handle = symmetric()
    mine.fill_(RANK + 1)
    dist.all_reduce(ones())
    assert handle.get_buffer(PEER, (64,), torch.float32).tolist() == [PEER + 1.0] * 64
    dist.all_reduce(ones())
    mine.fill_(0)
    assert_no_reports()
    handle.barrier(channel=0)


def test_a_signal_that_nobody_puts(control: dist.ProcessGroup) -> None:
    _, handle = symmetric()
    if RANK == 0:
        with pytest.raises(RuntimeError, match="symmetric memory timeout: rank 0 of 2 has waited for 300 ms"):
            handle.wait_signal(1, channel=3, timeout_ms=300)
        with pytest.raises(RuntimeError, match="The maximum supported channel"):
            handle.wait_signal(1, channel=99)
    dist.barrier(group=control)


def test_sizes_of_symmetric_memory_differ() -> None:
    tensor = symm_mem.empty(64 + RANK, device=torch.device("cuda", RANK))
    with pytest.raises(RuntimeError, match="symmetric memory of a group has one size"):
        symm_mem.rendezvous(tensor, dist.group.WORLD.group_name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_whose_communication_is_in_chunks(dtype: torch.dtype) -> None:
    group = dist.group.WORLD.group_name
    for _ in range(3):
        x, weight = torch.randn(8, 2, 16, device="cuda").to(dtype), torch.randn(16, 24, device="cuda").to(dtype)
        whole = torch.empty(16, 2, 16, device="cuda", dtype=dtype)
        dist.all_gather_into_tensor(whole, x)
        gathered, products = torch.ops.symm_mem.fused_all_gather_matmul(x, [weight], 0, group, return_A=True)
        assert torch.equal(gathered, whole)
        torch.testing.assert_close(products[0], whole @ weight)
        part = torch.ops.symm_mem.fused_matmul_reduce_scatter(whole, weight, "sum", 0, group)
        expected = torch.empty(8, 2, 24, device="cuda", dtype=dtype)
        dist.reduce_scatter_tensor(expected, whole @ weight)
        torch.testing.assert_close(part, expected)
    assert_no_reports()
