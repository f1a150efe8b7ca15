"""A linear map whose backward pass overlaps its communication with the weight gradient.

The weight gradient is accumulated in the parameter's main gradient where it has one.
Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053; Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.collectives import (
    all_gather_first_dim,
    all_gather_into,
    all_reduce,
    reduce_scatter_first_dim,
    reduce_scatter_into,
)
from megatron.core.fp8.float8_quantisers import Float8Quantisers
from megatron.core.host_memory.reused_memory import ReusedMemory
from megatron.core.kernels.matrix_product import linear, product
from megatron.core.main_grad import MainGrad, Receiver, bias_gradient, main_grad_of
from megatron.core.process_group import Group
from megatron.core.tensor_parallel.float8_linear import float8_linear
from megatron.core.tensor_parallel.mappings import InputRegion
from megatron.core.tensor_parallel.overlap.linear_overlap import WHOLE, LinearOverlap
from megatron.core.tensor_parallel.overlap.overlapped_linear import gathered_linear, scattered_linear


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
        overlap: LinearOverlap,
        scatters: bool,
        memory: ReusedMemory | None,
    ) -> torch.Tensor:
        # The input is needed for the weight's gradient alone: a frozen weight has none.
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.x_shape = x.shape
        ctx.region, ctx.tp, ctx.product_library = region, tp, library
        ctx.overlap, ctx.scatters = overlap, scatters
        # Asked for here: recompute hands the backward pass a copy of the weight that knows no main gradient.
        ctx.main_grad = main_grad_of(weight)
        ctx.bias_receiver = None if bias is None else Receiver.of(bias)
        bias = bias if adds_bias else None
        if overlap.forward and (scatters or region is InputRegion.SEQUENCE):
            if scatters:
                return scattered_linear(x, weight, bias, tp, overlap, library)
            return gathered_linear(x, weight, bias, tp, overlap, library)[0]
        full_x = all_gather_first_dim(x, tp) if region is InputRegion.SEQUENCE else x
        output = linear(full_x, weight, bias, library, memory)
        return reduce_scatter_first_dim(output, tp) if scatters else output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        region: InputRegion = ctx.region
        tp: Group = ctx.tp
        library: str = ctx.product_library
        overlap: LinearOverlap = ctx.overlap
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        own_grad, full_x, gathering = grad, x, None
        if region is InputRegion.SEQUENCE and tp.size > 1 and needs_weight_grad:
            full_x = x.new_empty((x.shape[0] * tp.size, *x.shape[1:]))
            gathering = all_gather_into(full_x, x.contiguous(), tp, async_op=overlap.bulk_gather)

        x_grad, reducing = None, None
        if ctx.scatters and overlap.backward and needs_x_grad:
            x_grad, gathered = gathered_linear(grad, weight.t(), None, tp, overlap, library, keeps=True)
            assert gathered is not None
            grad = gathered
        elif region is InputRegion.SEQUENCE and overlap.backward and needs_x_grad:
            x_grad = scattered_linear(grad, weight.t(), None, tp, overlap, library)
        else:
            grad = all_gather_first_dim(grad, tp) if ctx.scatters else grad
            if needs_x_grad:
                x_grad = linear(grad, weight.t(), library=library)
                if region is InputRegion.REPLICATED:
                    reducing = all_reduce(x_grad, tp, async_op=True)
                elif region is InputRegion.SEQUENCE and tp.size > 1:
                    full_x_grad = x_grad
                    x_grad = full_x_grad.new_empty(ctx.x_shape)
                    is_async = overlap.bulk_scatter
                    reducing = reduce_scatter_into(x_grad, full_x_grad.contiguous(), tp, async_op=is_async)

        if gathering is not None:
            gathering.wait()
        weight_grad = None
        if needs_weight_grad:
            rows = grad.reshape(-1, grad.shape[-1])
            weight_grad = _accumulate_weight_grad(ctx.main_grad, rows, full_x.reshape(-1, full_x.shape[-1]), library)
        bias_grad = bias_gradient(own_grad, ctx.bias_receiver) if needs_bias_grad else None
        if reducing is not None:
            reducing.wait()
        return x_grad, weight_grad, bias_grad, *(None,) * 7


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
    overlap: LinearOverlap = WHOLE,
    scatters: bool = False,
    memory: ReusedMemory | None = None,
    quantisers: Float8Quantisers | None = None,
) -> torch.Tensor:
    """Return ``x @ weight.T + bias`` on this rank's shard of the weight.

    Where the ranks' results are to be summed, only one of them ``adds_bias``; the bias has its gradient on all.
    ``library`` computes the products on CPU (see `linear`). ``scatters`` makes the sum, for an input that is SPLIT, and
    leaves each rank its part along s. ``overlap`` says what travels beside which product. ``memory`` holds a result
    that is computed whole on a CPU. With ``quantisers`` the products are in fp8, and nothing is overlapped here.

    Shapes: ``x: [s, b, in]`` (``[s/tp, b, in]`` where the region is SEQUENCE) ``-> [s, b, out]`` with the shard's own
    ``in`` and ``out``, ``[s/tp, b, out]`` where it ``scatters``. Backward: the input's gradient is all-reduced
    (REPLICATED) or reduce-scattered along s (SEQUENCE) while the weight's gradient is computed; the output's gradient
    is gathered along s where the output was scattered.
    """
    if quantisers is not None:
        return float8_linear(
            *(x, weight, bias, region, tp, quantisers), adds_bias=adds_bias, library=library, scatters=scatters
        )
    arguments = (x, weight, bias, region, tp, adds_bias, library, overlap, scatters, memory)
    result: torch.Tensor = _Linear.apply(*arguments)  # type: ignore[no-untyped-call]
    return result
