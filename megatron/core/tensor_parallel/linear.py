"""A linear map whose backward overlaps its communication with the weight gradient.

The weight gradient goes straight into the parameter's main gradient where it has one.
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
    reduce_scatter_first_dim,
    reduce_scatter_into,
)
from megatron.core.main_grad import MainGrad, main_grad_of
from megatron.core.matrix_product import linear, product
from megatron.core.process_group import Group


class Region(Enum):
    """Say how the input or the output of a linear map is laid out over the tensor-parallel group."""

    SPLIT = "split"
    """Each rank holds features of its own; neither they nor their gradient need communication."""
    REPLICATED = "replicated"
    """Every rank holds the same. As input, its gradient is all-reduced; as output, the ranks' products are."""
    SEQUENCE = "sequence"
    """Ranks hold parts of dim 0. As input, gathered forward, and the gradient reduce-scattered backward; as output,
    the ranks' products are reduce-scattered forward, and the gradient gathered backward."""


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        region: Region,
        output_region: Region,
        tp: Group,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.region, ctx.output_region, ctx.tp, ctx.has_bias = region, output_region, tp, bias is not None
        # Asked for here: recompute hands the backward pass a copy of the weight that knows no main gradient.
        ctx.main_grad = main_grad_of(weight)
        full_x = all_gather_first_dim(x, tp) if region is Region.SEQUENCE else x
        if output_region is Region.SPLIT:
            return linear(full_x, weight, bias)
        # One rank brings the bias into the sum: the product adds it for nothing, a pass of its own would cost memory.
        partial = linear(full_x, weight, bias if tp.rank == 0 else None)
        if output_region is Region.SEQUENCE:
            return reduce_scatter_first_dim(partial, tp)
        all_reduce(partial, tp)
        return partial

    @staticmethod
    def backward(
        ctx: Any, grad: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None, None, None, None]:
        x, weight = ctx.saved_tensors
        region: Region = ctx.region
        tp: Group = ctx.tp
        needs_x_grad, needs_weight_grad = ctx.needs_input_grad[:2]
        own_grad = grad
        if ctx.output_region is Region.SEQUENCE:
            grad = all_gather_first_dim(grad, tp)
        full_x, gathering = x, None
        if region is Region.SEQUENCE and tp.size > 1 and needs_weight_grad:
            full_x = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
            gathering = all_gather_into(full_x, x.contiguous(), tp, async_op=True)

        x_grad, reducing = None, None
        if needs_x_grad:
            x_grad = linear(grad, weight.t())
            if region is Region.REPLICATED:
                reducing = all_reduce(x_grad, tp, async_op=True)
            elif region is Region.SEQUENCE and tp.size > 1:
                full_x_grad = x_grad
                x_grad = x.new_empty(x.shape)
                reducing = reduce_scatter_into(x_grad, full_x_grad.contiguous(), tp, async_op=True)

        if gathering is not None:
            gathering.wait()
        rows = grad.reshape(-1, grad.shape[-1])
        weight_grad = None
        if needs_weight_grad:
            weight_grad = _accumulate_weight_grad(ctx.main_grad, rows, full_x.reshape(-1, full_x.shape[-1]))
        bias_grad = own_grad.reshape(-1, own_grad.shape[-1]).sum(dim=0) if ctx.has_bias else None
        if reducing is not None:
            reducing.wait()
        return x_grad, weight_grad, bias_grad, None, None, None


def _accumulate_weight_grad(main_grad: MainGrad | None, grad: torch.Tensor, x: torch.Tensor) -> torch.Tensor | None:
    if main_grad is None:
        return product(grad.t(), x)
    main_grad.add_matmul(grad.t(), x)
    return None


def tensor_parallel_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    region: Region,
    tp: Group,
    output_region: Region = Region.SPLIT,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` on this rank's shard of the weight, or its sum over the group.

    ``region`` is where ``x`` is laid out, ``output_region`` the result. The input's gradient is communicated while the
    weight's gradient is computed. A bias under ``output_region`` SEQUENCE has the gradient of this rank's part of s.

    Shapes: ``x: [s, b, in]`` (``[s/tp, b, in]`` where its region is SEQUENCE) ``-> [s, b, out]`` (``[s/tp, b, out]``)
    with the shard's own ``in`` and ``out``.
    """
    result: torch.Tensor = _Linear.apply(x, weight, bias, region, output_region, tp)  # type: ignore[no-untyped-call]
    return result
