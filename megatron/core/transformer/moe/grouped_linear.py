"""A linear map with another weight for each group of rows: the experts' products."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.kernels.matrix_product import RowCounts, grouped_gradient, grouped_product, row_counts
from megatron.core.main_grad import Receiver, main_grad_of


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counts: RowCounts,
        adds_bias: bool,
        library: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.counts, ctx.product_library = counts, library
        # Asked for here: recompute hands the backward pass a copy of the weight that knows no main gradient.
        ctx.main_grad = main_grad_of(weight)
        ctx.bias_receiver = None if bias is None else Receiver.of(bias)
        output = grouped_product(x, weight, counts, library)
        if bias is not None and adds_bias:
            for group, of_group in zip(output.split_with_sizes(counts), bias):
                group += of_group
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        counts, library = ctx.counts, ctx.product_library
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        grad = grad.contiguous()
        x_grad = grouped_product(grad, weight.transpose(1, 2), counts, library) if needs_x_grad else None
        weight_grad = None
        if needs_weight_grad and ctx.main_grad is not None:
            ctx.main_grad.add_grouped_matmul(grad, x, counts, library)
        elif needs_weight_grad:
            weight_grad = grouped_gradient(grad, x, counts, library)
        bias_grad = None
        if needs_bias_grad:
            bias_grad = torch.stack([rows.sum(dim=0) for rows in grad.split_with_sizes(counts)])
        return x_grad, weight_grad, bias_grad, None, None, None


def grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counts: Sequence[int],
    *,
    adds_bias: bool = True,
    library: str = "auto",
) -> torch.Tensor:
    """Multiply each group of rows, which follow one another, by the weight of the group.

    Where several ranks' results are to be summed, only one of them ``adds_bias``; the bias has its gradient on all.

    Shapes: ``x: [n, in]``, ``weight: [groups, out, in]``, ``bias: [groups, out]``, counts that sum to n ``->
    [n, out]``.
    """
    result: torch.Tensor = _GroupedLinear.apply(  # type: ignore[no-untyped-call]
        x, weight, bias, row_counts(counts), adds_bias, library
    )
    return result
