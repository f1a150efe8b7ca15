"""A linear map whose backward pass overlaps its communication with the weight gradient.

The weight gradient is accumulated in the parameter's main gradient where it has one.
Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch

from megatron.core.collectives import (
    all_gather_first_dim,
    all_gather_into,
    all_reduce,
    reduce_scatter_into,
)
from megatron.core.kernels.matrix_product import linear, product
from megatron.core.main_grad import MainGrad, Receiver, bias_gradient, main_grad_of
from megatron.core.process_group import Group


class InputRegion(Enum):
    """Say how the input of a linear map is laid out over the tensor-parallel group."""

    SPLIT = "split"
    """Each rank holds its own input; its gradient needs no communication (row-parallel)."""
    REPLICATED = "replicated"
    """Every rank holds the same input; its gradient is all-reduced."""
    SEQUENCE = "sequence"
    """Ranks hold parts of dim 0: gathered forward, the gradient reduce-scattered backward."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        region: InputRegion,
        tp: Group,
        adds_bias: bool,
        library: str,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.region, ctx.tp, ctx.product_library = region, tp, library
        # Asked for here: recompute hands the backward pass a copy of the weight that knows no main gradient.
        ctx.main_grad = main_grad_of(weight)
        ctx.bias_receiver = None if bias is None else Receiver.of(bias)
        full_x = all_gather_first_dim(x, tp) if region is InputRegion.SEQUENCE else x
        return linear(full_x, weight, bias if adds_bias else None, library)

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None, None]:
        x, weight = ctx.saved_tensors
        region: InputRegion = ctx.region
        tp: Group = ctx.tp
        library: str = ctx.product_library
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        full_x, gathering = x, None
        if region is InputRegion.SEQUENCE and tp.size > 1 and needs_weight_grad:
            full_x = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
            gathering = all_gather_into(full_x, x.contiguous(), tp, async_op=True)

        x_grad, reducing = None, None
        if needs_x_grad:
            x_grad = linear(grad, weight.t(), library=library)
            if region is InputRegion.REPLICATED:
                reducing = all_reduce(x_grad, tp, async_op=True)
            elif region is InputRegion.SEQUENCE and tp.size > 1:
                full_x_grad = x_grad
                x_grad = x.new_empty(x.shape)
                reducing = reduce_scatter_into(x_grad, full_x_grad.contiguous(), tp, async_op=True)

        if gathering is not None:
            gathering.wait()
        rows = grad.reshape(-1, grad.shape[-1])
        weight_grad = None
        if needs_weight_grad:
            weight_grad = _accumulate_weight_grad(ctx.main_grad, rows, full_x.reshape(-1, full_x.shape[-1]), library)
        bias_grad = bias_gradient(grad, ctx.bias_receiver) if needs_bias_grad else None
        if reducing is not None:
            reducing.wait()
        return x_grad, weight_grad, bias_grad, None, None, None, None


def _accumulate_weight_grad(
    main_grad: MainGrad | None, grad: torch.Tensor, x: torch.Tensor, library: str
) -> torch.Tensor | None:
    if main_grad is None:
        return product(grad.t(), x, library)
    main_grad.add_matmul(grad.t(), x, library)
    return None


def tensor_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    region: InputRegion,
    tp: Group,
    *,
    adds_bias: bool = True,
    library: str = "auto",
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` on this rank's shard of the weight.

    Where the ranks' results are to be summed, only one of them ``adds_bias``; the bias has its gradient on all.
    ``library`` computes the products on CPU (see `linear`).

    Shapes: ``x: [s, b, in]`` (``[s/tp, b, in]`` where the region is SEQUENCE) ``-> [s, b, out]`` with the shard's own
    ``in`` and ``out``. Backward: the input's gradient is all-reduced (REPLICATED) or reduce-scattered along s
    (SEQUENCE) while the weight's gradient is computed.
    """
    result: torch.Tensor = _Linear.apply(x, weight, bias, region, tp, adds_bias, library)  # type: ignore[no-untyped-call]
    return result
