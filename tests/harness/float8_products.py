"""A linear layer in fp8 against float64 products of the same quantized operands."""

from __future__ import annotations

from typing import Any

import torch


def assert_products(module: Any, length: int, batch: int, generator: torch.Generator, name: str) -> None:
    """Assert that a layer's product, its input's gradient and its weight's are those of the quantized operands.

    Shapes: the layer is given ``[length, batch, in]``.
    """
    weight, quantizers = module.weight, module.quantizers
    x = torch.randn(length, batch, weight.shape[1], generator=generator).bfloat16().requires_grad_()
    grad = torch.randn(length, batch, weight.shape[0], generator=generator).bfloat16()
    output = module(x)
    output.backward(grad)
    (left, left_turned), (back, back_turned) = (
        quantizers.matrix(operand, matrix.detach().flatten(0, 1), transpose=True, records=False)
        for operand, matrix in (("input", x), ("grad", grad))
    )
    plain, turned = (
        quantizers.weight(weight.detach(), transpose=flag, records=False, scale=None) for flag in (False, True)
    )
    assert x.grad is not None
    bias = getattr(module, "bias", None)
    added = 0.0 if bias is None else bias.detach().double()
    for found, one, other, of_bias in (
        (output.detach().flatten(0, 1), left, plain, added),
        (x.grad.flatten(0, 1), back, turned, 0.0),
        (weight.grad, back_turned, left_turned, 0.0),
    ):
        exact = one.values(torch.float64) @ other.values(torch.float64).t() + of_bias
        # The result is rounded to bfloat16; sums are of float32.
        largest = float(exact.abs().max())
        torch.testing.assert_close(found.double(), exact, rtol=2**-8, atol=1e-5 * largest, msg=name)
