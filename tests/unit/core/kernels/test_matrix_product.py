"""Products by whichever kernel is chosen, against float64."""

from __future__ import annotations

import pytest
import torch

from megatron.core.kernels import matrix_product
from megatron.core.kernels.matrix_product import has_library, linear, product, uses_onednn

LIBRARIES = [name for name in ("onednn", "mkl") if has_library(name, torch.float32)]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("leading", [(1,), (31,), (32,), (5, 13)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_with_any_strides(leading: tuple[int, ...], has_bias: bool, library: str) -> None:
    x, weight = torch.randn(*leading, 48), torch.randn(70, 48)
    bias = torch.randn(70) if has_bias else None
    expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    close(linear(x, weight, bias, library), expected)
    transposed = torch.randn(48, 70)
    close(linear(x, transposed.t(), library=library), x.double() @ transposed.double())
    strided = torch.randn(*leading, 96)[..., ::2]
    close(linear(strided, weight, library=library), strided.double() @ weight.double().t())


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize(("a", "b"), [(40, 56), (56, 40), (3, 70), (70, 3), (1, 1)])
def test_product_of_a_transposed_matrix(a: int, b: int, library: str) -> None:
    left, right = torch.randn(65, a), torch.randn(65, b)
    result = product(left.t(), right, library)
    assert result.shape == (a, b)
    close(result, left.double().t() @ right.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_only_float32_goes_to_onednn_unasked(dtype: torch.dtype) -> None:
    assert not uses_onednn(torch.zeros(64, 8, dtype=dtype))
    assert not uses_onednn(torch.zeros(64, 8, device="meta"))
    assert not uses_onednn(torch.zeros(0, 8))
    assert uses_onednn(torch.zeros(64, 8)) == matrix_product._HAS_ONEDNN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_library_that_is_asked_for_counts(dtype: torch.dtype) -> None:
    x = torch.zeros(64, 8, dtype=dtype)
    assert not uses_onednn(x, "mkl")
    assert uses_onednn(x, "onednn") == has_library("onednn", dtype)
    assert not has_library("onednn", torch.float16)


def test_bfloat16_products_of_both_libraries() -> None:
    x, weight = torch.randn(65, 48).bfloat16(), torch.randn(70, 48).bfloat16()
    for library in ("onednn", "mkl"):
        expected = x.double() @ weight.double().t()
        torch.testing.assert_close(linear(x, weight, library=library).double(), expected, rtol=0.0, atol=0.15)
        torch.testing.assert_close(product(x, weight.t(), library).double(), expected, rtol=0.0, atol=0.15)


def test_float64_keeps_its_precision() -> None:
    x, weight = torch.randn(64, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
