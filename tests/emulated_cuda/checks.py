"""Checks of the emulator itself, each of which plants a fault or is clean.

They run in a process of their own, whose torch has emulated devices: see ``tests/unit/emulated_cuda``.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from tests.emulated_cuda.activation import load_bindings

RACE = "emulated CUDA: race"


@pytest.fixture(autouse=True)
def reports_are_expected() -> Iterator[None]:
    """Forget the reports of planted faults, which would end the process with an error."""
    yield
    load_bindings().clear_reports()
    torch.cuda.synchronize()


def test_values_are_those_of_the_cpu() -> None:
    x = torch.randn(8, 8, requires_grad=True)
    y = x.detach().cuda().requires_grad_()
    for tensor in (x, y):
        (tensor @ tensor).relu().sum().backward()
    assert x.grad is not None
    assert y.grad is not None
    assert y.grad.is_cuda
    assert torch.equal(y.grad.cpu(), x.grad)


def test_bfloat16_products_take_memory_without_a_tensor() -> None:
    x = torch.randn(32, 96, dtype=torch.bfloat16)
    assert torch.equal(torch.nn.functional.linear(x.cuda(), x.cuda()).cpu(), torch.nn.functional.linear(x, x))


@pytest.mark.parametrize("waits", [True, False])
def test_a_missing_wait_is_a_race(waits: bool) -> None:
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    if waits:
        torch.cuda.current_stream().wait_stream(side)
        assert x.sum().item() == 8
    else:
        with pytest.raises(RuntimeError, match=RACE) as caught:
            x.sum()
        assert "aten::mul on stream" in str(caught.value)
        assert str(caught.value).count("checks.py") >= 2


def test_a_race_with_a_view_at_another_offset() -> None:
    bucket = torch.zeros(64, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        bucket[16:32].fill_(1)
    # Bytes on both sides of the view have no conflict.
    bucket[:16].add_(1)
    bucket[32:].add_(1)
    with pytest.raises(RuntimeError, match=RACE):
        bucket.add_(1)


def test_columns_that_interleave_do_not_conflict() -> None:
    matrix = torch.zeros(8, 4, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        matrix[:, :2].fill_(1)
    matrix[:, 2:].fill_(2)
    with pytest.raises(RuntimeError, match=RACE):
        matrix[:, 1:3].fill_(3)


def test_an_event_that_was_recorded_too_early() -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    x = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    event.record(side)
    with torch.cuda.stream(side):
        x.mul_(2)
    event.wait()
    with pytest.raises(RuntimeError, match=RACE):
        x.add_(1)


def test_backward_runs_on_the_stream_of_its_forward() -> None:
    side = torch.cuda.Stream()
    x = torch.ones(4, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        loss = (x * 3).sum()
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [3.0] * 4


@pytest.mark.parametrize("is_recorded", [True, False])
def test_memory_that_is_reused_while_another_stream_uses_it(is_recorded: bool) -> None:
    side = torch.cuda.Stream()
    x = torch.ones(300_000, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        y = x * 2
    if is_recorded:
        x.record_stream(side)
    del x
    if is_recorded:
        torch.empty(300_000, device="cuda")
    else:
        with pytest.raises(RuntimeError, match="memory reused too early"):
            torch.empty(300_000, device="cuda")
    torch.cuda.current_stream().wait_stream(side)
    assert y[0].item() == 2


def test_memory_that_joins_its_neighbor_is_reused_too_early() -> None:
    side = torch.cuda.Stream()
    with torch.cuda.stream(torch.cuda.Stream()):
        # A segment of two blocks, of which only the first is in use by another stream.
        x, rest = torch.ones(128, device="cuda"), torch.ones(128, device="cuda")
        assert rest.data_ptr() == x.data_ptr() + 512
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            y = x * 2
        del x
        # Too large for the freed block alone: the allocator merges the two free blocks.
        torch.empty(200, device="cuda")
        del rest
        with pytest.raises(RuntimeError, match="memory reused too early"):
            torch.empty(200, device="cuda")
        torch.cuda.current_stream().wait_stream(side)
        assert y[0].item() == 2


def test_freed_memory_is_reused_and_poisoned() -> None:
    x = torch.zeros(1000, device="cuda")
    address = x.data_ptr()
    del x
    y = torch.empty(1000, device="cuda")
    assert y.data_ptr() == address
    assert y.isnan().all()


def test_storages_resize() -> None:
    x = torch.ones(1000, device="cuda")
    before = torch.cuda.memory_allocated()
    x.untyped_storage().resize_(0)
    assert torch.cuda.memory_allocated() == before - 4096
    x.untyped_storage().resize_(4000)
    assert x.isnan().all()


def test_copies_to_the_host_arrive_late() -> None:
    x = torch.ones(4, device="cuda")
    target = torch.empty(4, pin_memory=True)
    assert target.is_pinned()
    target.copy_(x, non_blocking=True)
    assert target.isnan().all()
    torch.cuda.current_stream().synchronize()
    assert target.tolist() == [1.0] * 4


def test_a_query_may_come_too_early() -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    x = torch.ones(4, device="cuda")
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    event.record(side)
    assert not event.query()
    assert not side.query()
    with pytest.raises(RuntimeError, match=RACE):
        x.sum()
    for ask in (event.query, side.query):
        while not ask():
            pass
    assert x.sum().item() == 8


@pytest.mark.parametrize("waits", [True, False])
def test_a_pinned_source_that_changes_too_early(waits: bool) -> None:
    source = torch.ones(4).pin_memory()
    target = torch.empty(4, device="cuda")
    target.copy_(source, non_blocking=True)
    if waits:
        torch.cuda.synchronize()
        source.fill_(2)
        torch.cuda.synchronize()
    else:
        source.fill_(2)
        with pytest.raises(RuntimeError, match="pinned memory changed too early"):
            torch.cuda.synchronize()


def test_a_cpu_tensor_meets_a_device() -> None:
    x = torch.ones(4, device="cuda")
    assert (x + torch.tensor(1.0)).tolist() == [2.0] * 4
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.cat([x, torch.ones(4)])
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        torch.mm(torch.ones(2, 2, device="cuda"), torch.ones(2, 2))


def test_generators_have_a_seed_and_an_offset() -> None:
    torch.cuda.manual_seed(7)
    state = torch.cuda.get_rng_state()
    first, second = torch.rand(3, device="cuda"), torch.rand(3, device="cuda")
    assert state.numel() == 16
    assert not torch.equal(first, second)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)


def test_a_graph_computes_when_it_is_replayed() -> None:
    x = torch.ones(4, device="cuda")
    total = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 3
        total.add_(y)
    assert y.isnan().all()
    assert not total.any()
    graph.replay()
    x.fill_(2)
    graph.replay()
    assert y.tolist() == [6.0] * 4
    assert total.tolist() == [9.0] * 4


@pytest.mark.parametrize("is_taken", [True, False])
def test_memory_of_a_graph_that_is_released(is_taken: bool) -> None:
    x = torch.ones(3000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 3
    graph.replay()
    assert y[0].item() == 3
    address = x.data_ptr()
    del x
    if is_taken:
        other = torch.ones(3000, device="cuda")
        assert other.data_ptr() == address
    with pytest.raises(RuntimeError, match="memory of a graph was released: aten::mul in a replayed graph"):
        graph.replay()


def test_a_graph_has_the_scalars_of_its_capture() -> None:
    x, scale = torch.ones(4, device="cuda"), torch.tensor(3.0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * scale
    scale.fill_(5.0)
    graph.replay()
    assert y.tolist() == [3.0] * 4


def test_indices_of_the_host_are_copied_and_waited_for() -> None:
    core = load_bindings()
    x = torch.arange(4.0, device="cuda")
    before = core.host_wait_count()
    assert x[torch.tensor([2, 0])].add(1).is_cuda
    assert core.host_wait_count() > before
    capture = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"), capture:
        x[torch.tensor([2, 0])]


def test_waits_of_the_host_are_counted() -> None:
    core = load_bindings()
    x, event = torch.ones(4, device="cuda"), torch.cuda.Event()
    event.record()
    before = core.host_wait_count()
    for wait in (
        x.sum().item,
        torch.cuda.synchronize,
        event.synchronize,
        x.cpu,
        lambda: torch.tensor(1.0, device="cuda"),
    ):
        wait()
    x.add_(1.0).mul_(torch.tensor(2.0))
    event.query()
    assert core.host_wait_count() == before + 5


def test_freed_memory_of_a_graph_is_poisoned() -> None:
    x = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        inner = x * 3
        address = inner.data_ptr()
        y = inner + 1
        del inner
    # What only the captured work used is free for the next graph of the pool.
    assert set(ctypes.string_at(address, 4000)) == {0xFF}
    graph.replay()
    assert y.tolist() == [4.0] * 1000
    address = y.data_ptr()
    torch.cuda.synchronize()
    del y
    assert set(ctypes.string_at(address, 4000)) == {0xFF}
    # The pool lasts as long as its graph: other tensors are not given its memory.
    assert torch.empty(1000, device="cuda").data_ptr() != address


def test_matmuls_of_same_bits_need_a_workspace() -> None:
    # The setting is read at the first matmul of a process.
    code = (
        "import torch; torch.use_deterministic_algorithms(True); x = torch.ones(4, 4, device='cuda'); "
        "print((x @ x).sum().item())"
    )
    for setting, expected in ((":4096:8", "64.0"), ("", "")):
        env = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": setting}
        found = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
        assert found.stdout.strip() == expected, found.stderr
        assert ("it uses CuBLAS and you have CUDA >= 10.2" in found.stderr) == (not setting)


def test_a_capture_permits_no_host_read() -> None:
    x = torch.ones(4, device="cuda")
    for read in (lambda: x.sum().item(), lambda: x.nonzero(), lambda: x.cpu(), torch.cuda.synchronize):
        capture = torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local")
        with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"), capture:
            read()
    assert not torch.cuda.is_current_stream_capturing()


def test_memory_figures() -> None:
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    x = torch.empty(3 << 20, dtype=torch.uint8, device="cuda")
    assert torch.cuda.memory_allocated() - before == 3 << 20
    assert torch.cuda.memory_reserved() >= 20 << 20
    del x
    assert torch.cuda.memory_allocated() == before
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 40, dtype=torch.uint8, device="cuda")
