"""Checks of Triton programs on emulated devices, each of which plants a fault or is clean; they need two devices."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import triton
import triton.language as tl
from triton.errors import TritonError

from tests.emulated_cuda.activation import load_bindings

LENGTH, BLOCK = 20, 16


@pytest.fixture(autouse=True)
def reports_are_expected() -> Iterator[None]:
    """Forget the reports of planted faults, which would end the process with an error."""
    yield
    load_bindings().clear_reports()
    torch.cuda.synchronize()


@triton.jit
def add_one(source, target, length, MASKED: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < length
    if MASKED:
        tl.store(target + place, tl.load(source + place, mask=inside) + 1, mask=inside)
    else:
        tl.store(target + place, tl.load(source + place) + 1)


def launch(source: torch.Tensor, target: torch.Tensor, *, masked: bool = True) -> None:
    add_one[(triton.cdiv(LENGTH, BLOCK),)](source, target, LENGTH, MASKED=masked, BLOCK=BLOCK)


def test_a_program_computes_on_the_memory_of_its_tensors() -> None:
    x = torch.arange(float(LENGTH), device="cuda")
    y = torch.empty_like(x)
    launch(x, y)
    assert torch.equal(y, x + 1)


def test_a_program_passes_the_end_of_its_tensors() -> None:
    x = torch.ones(LENGTH, device="cuda")
    with pytest.raises(RuntimeError, match="an illegal memory access was encountered: add_one accesses"):
        launch(x, torch.empty_like(x), masked=False)


def test_a_program_is_launched_on_another_device_than_its_tensors() -> None:
    x = torch.ones(LENGTH, device="cuda:1")
    with pytest.raises(RuntimeError, match="add_one is launched on device 0 with tensors of device 1"):
        launch(x, torch.empty_like(x))
    with torch.cuda.device(1):
        launch(x, torch.empty_like(x))
    with pytest.raises(ValueError, match="tensors of several devices"):
        launch(x, torch.empty(LENGTH, device="cuda"))


@triton.jit
def add_up(source, target, length, ATOMIC: tl.constexpr, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    own = tl.sum(tl.load(source + place, mask=place < length, other=0.0))
    if ATOMIC:
        tl.atomic_add(target, own)
    else:
        tl.store(target, tl.load(target) + own)


def test_a_race_between_the_instances_of_a_program() -> None:
    x, total = torch.ones(LENGTH, device="cuda"), torch.zeros(1, device="cuda")
    add_up[(triton.cdiv(LENGTH, BLOCK),)](x, total, LENGTH, ATOMIC=True, BLOCK=BLOCK)
    assert total.item() == LENGTH
    with pytest.raises(RuntimeError, match="race: an instance of the Triton program add_up stores"):
        add_up[(triton.cdiv(LENGTH, BLOCK),)](x, total, LENGTH, ATOMIC=False, BLOCK=BLOCK)


@triton.jit
def copy_first(source, target, num_stored, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(target + place, tl.load(source + place), mask=place < num_stored)


def test_a_launch_that_loads_and_stores_nothing() -> None:
    x, y = torch.ones(BLOCK, device="cuda"), torch.zeros(BLOCK, device="cuda")
    copy_first[(1,)](x, y, 0, BLOCK=BLOCK)
    assert not y.any()
    copy_first[(1,)](x, y, 3, BLOCK=BLOCK)
    assert y.sum().item() == 3


@triton.jit
def convert(source, target, FORMAT: tl.constexpr):
    tl.store(target, tl.load(source).to(FORMAT).to(tl.float32))


@pytest.mark.skipif(torch.cuda.get_device_capability() >= (8, 9), reason="the device has E4M3")
def test_a_format_for_which_triton_does_not_compile() -> None:
    x, y = torch.full((1,), 1.7, device="cuda"), torch.zeros(1, device="cuda")
    convert[(1,)](x, y, FORMAT=tl.float8e5)
    assert y.item() == 1.75
    with pytest.raises(TritonError, match="type fp8e4nv not supported in this architecture"):
        convert[(1,)](x, y, FORMAT=tl.float8e4nv)


def test_a_race_of_a_program_with_another_stream() -> None:
    x = torch.ones(LENGTH, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.mul_(2)
    with pytest.raises(RuntimeError, match="emulated CUDA: race: triton:add_one"):
        launch(x, torch.empty_like(x))


def test_a_program_is_compiled_before_it_is_captured() -> None:
    x = torch.ones(LENGTH, device="cuda", dtype=torch.float16)
    y = torch.empty_like(x)
    for is_compiled in (False, True):
        graph = torch.cuda.CUDAGraph()
        capture = torch.cuda.graph(graph, capture_error_mode="thread_local")
        if is_compiled:
            launch(x, y)
            with capture:
                launch(x, y)
        else:
            with pytest.raises(RuntimeError, match=r"operation not permitted .* compilation of the Triton"), capture:
                launch(x, y)
