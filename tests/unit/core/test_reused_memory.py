"""Memory that one large tensor after another lives in."""

from __future__ import annotations

import gc

import pytest
import torch

from megatron.core.host_memory import MIN_BYTES, ReusedMemory
from megatron.core.ops.gemm import linear

_ROWS = MIN_BYTES // (4 * 1024)


def test_a_dead_tensors_memory_is_lent_again() -> None:
    memory = ReusedMemory()
    first = memory.empty((_ROWS, 1024), torch.float32)
    address = first.data_ptr()
    del first
    again = memory.empty((2 * _ROWS, 1024), torch.bfloat16)
    assert again.data_ptr() == address
    assert again.shape == (2 * _ROWS, 1024)
    assert again.dtype is torch.bfloat16


@pytest.mark.parametrize("first_to_go", [0, 1])
def test_of_two_dead_tensors_the_larger_ones_memory_is_lent(first_to_go: int) -> None:
    memory = ReusedMemory()
    both = [memory.empty((rows, 1024), torch.float32) for rows in (_ROWS, 2 * _ROWS)]
    address = both[1].data_ptr()
    both.pop(first_to_go)
    both.clear()
    assert memory.empty((2 * _ROWS, 1024), torch.float32).data_ptr() == address


def test_memory_of_a_living_tensor_is_not_lent() -> None:
    memory = ReusedMemory()
    view = memory.empty((_ROWS, 1024), torch.float32)[3:5].fill_(7.0)
    gc.collect()
    memory.empty((_ROWS, 1024), torch.float32).fill_(1.0)
    assert (view == 7.0).all()


def test_autograd_keeps_what_it_saved() -> None:
    memory = ReusedMemory()
    x = torch.randn(_ROWS, 16, requires_grad=True)
    weight = torch.randn(1024, 16)
    with torch.no_grad():
        product = linear(x, weight, library="mkl", memory=memory)
    scale = torch.ones((), requires_grad=True)
    loss = (product * scale).sum()
    expected = product.sum()
    del product
    memory.empty((_ROWS, 1024), torch.float32).zero_()
    loss.backward()
    assert scale.grad is not None
    torch.testing.assert_close(scale.grad, expected)


def test_a_small_tensor_is_its_own() -> None:
    memory = ReusedMemory()
    first = memory.empty((4, 4), torch.float32)
    assert first.untyped_storage().nbytes() == 64


@pytest.mark.full
def test_a_product_in_lent_memory_is_the_product() -> None:
    memory = ReusedMemory()
    for dtype, biases in ((torch.float32, (False, True)), (torch.bfloat16, (True,))):
        x, weight, bias = (
            torch.randn(shape).to(dtype) for shape in ((64, 32), (MIN_BYTES // 64, 32), (MIN_BYTES // 64,))
        )
        for with_bias in (bias if has else None for has in biases):
            with torch.no_grad():
                got = linear(x.view(8, 8, 32), weight, with_bias, "mkl", memory)
            expected = torch.nn.functional.linear(x.view(8, 8, 32), weight, with_bias)
            torch.testing.assert_close(got, expected)


def test_blocks_that_the_c_library_would_return_to_the_system_are_kept() -> None:
    memory = ReusedMemory()
    memory.empty((2**25,), torch.uint8).fill_(7)
    assert (memory.empty((2**25,), torch.uint8)[::4096] == 7).all()
