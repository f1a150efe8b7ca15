"""Products by whichever kernel is chosen, against float64."""

from __future__ import annotations

import pytest
import torch

from megatron.core.kernels import matrix_product
from megatron.core.kernels.matrix_product import linear, prefers_onednn, product


@pytest.fixture(params=[True, False], ids=["onednn", "mkl"])
def _kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matrix_product, "_HAS_ONEDNN", matrix_product._HAS_ONEDNN and request.param)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=0.0, atol=1e-5 * float(expected.abs().max()))


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize("leading", [(1,), (31,), (32,), (5, 13)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_linear_with_any_strides(leading: tuple[int, ...], has_bias: bool) -> None:
    x, weight = torch.randn(*leading, 48), torch.randn(70, 48)
    bias = torch.randn(70) if has_bias else None
    expected = x.double() @ weight.double().t() + (0.0 if bias is None else bias.double())
    close(linear(x, weight, bias), expected)
    transposed = torch.randn(48, 70)
    close(linear(x, transposed.t()), x.double() @ transposed.double())
    strided = torch.randn(*leading, 96)[..., ::2]
    close(linear(strided, weight), strided.double() @ weight.double().t())


@pytest.mark.usefixtures("_kernel")
@pytest.mark.parametrize(("a", "b"), [(40, 56), (56, 40), (3, 70), (70, 3), (1, 1)])
def test_product_of_a_transposed_matrix(a: int, b: int) -> None:
    left, right = torch.randn(65, a), torch.randn(65, b)
    result = product(left.t(), right)
    assert result.shape == (a, b)
    close(result, left.double().t() @ right.double())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_only_float32_goes_to_onednn(dtype: torch.dtype) -> None:
    assert not prefers_onednn(torch.zeros(64, 8, dtype=dtype))
    assert not prefers_onednn(torch.zeros(64, 8, device="meta"))
    assert not prefers_onednn(torch.zeros(0, 8))
    assert prefers_onednn(torch.zeros(64, 8)) == matrix_product._HAS_ONEDNN


def test_float64_keeps_its_precision() -> None:
    x, weight = torch.randn(64, 8, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    assert torch.equal(linear(x, weight), torch.nn.functional.linear(x, weight))
