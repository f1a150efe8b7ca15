"""The experts' products in fp8: each expert's operands are quantised as those of a linear layer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from megatron.core.fp8.float8_quantisers import Float8Quantisers
from megatron.core.kernels.float8.quantised import WHOLE, Blocks, Quantised
from megatron.core.kernels.float8.scaled_product import has_scaled_products, scaled_product
from megatron.core.kernels.matrix_product import RowCounts, grouped_gradient, row_counts
from megatron.core.main_grad import main_grad_of

_MULTIPLE = 16
"""Of so many rows are what a device's fp8 products sum over; rows of zeros make up for what is missing.

Of scales for blocks along the rows a device's products of its own take whole blocks alone.
"""
_Operands = list[tuple[Quantised, Quantised] | None]


class _Float8GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        counts: RowCounts,
        adds_bias: bool,
        library: str,
        quantisers: Sequence[Float8Quantisers],
        records: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        ctx.counts, ctx.product_library, ctx.quantisers, ctx.records = counts, library, quantisers, records
        # Asked for here: recompute hands the backward pass a copy of the weight that knows no main gradient.
        ctx.main_grad = main_grad_of(weight)
        output = x.new_empty(len(x), weight.shape[1])
        ctx.scales = []
        for number, (rows, into) in enumerate(zip(x.split_with_sizes(counts), output.split_with_sizes(counts))):
            if not len(rows):
                ctx.scales.append((None, None))
                continue
            own = quantisers[number]
            quantised = own.weight(weight[number], transpose=False, records=records, scale=None)
            plain, _ = own.matrix("input", _padded(rows, _MULTIPLE), transpose=False, records=records)
            into.copy_(scaled_product(plain, quantised, x.dtype, library=library)[: len(rows)])
            if bias is not None and adds_bias:
                into += bias[number]
            # What is rounded again has the scale of the first time, where there is one for all of it.
            ctx.scales.append((plain.scale, quantised.scale) if plain.blocks == WHOLE else (None, None))
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        counts, library = ctx.counts, ctx.product_library
        quantisers: Sequence[Float8Quantisers] = ctx.quantisers
        needs_x_grad, needs_weight_grad, needs_bias_grad = ctx.needs_input_grad[:3]
        grad = grad.contiguous()
        in_fp8 = needs_weight_grad and quantisers[0].recipe.has_weight_gradients
        x_grad = grad.new_empty(len(grad), weight.shape[2]) if needs_x_grad else None
        operands: _Operands = []
        multiple = _summed_multiple(quantisers[0].recipe.blocks, grad.device.type) if in_fp8 else _MULTIPLE
        start = 0
        for number, rows in enumerate(grad.split_with_sizes(counts)):
            end = start + len(rows)
            if not len(rows):
                operands.append(None)
                continue
            own, (x_scale, weight_scale) = quantisers[number], ctx.scales[number]
            plain, turned = own.matrix("grad", _padded(rows, multiple), transpose=in_fp8, records=ctx.records)
            if x_grad is not None:
                quantised = own.weight(weight[number], transpose=True, records=False, scale=weight_scale)
                few = _first_rows(plain, len(rows) + -len(rows) % _MULTIPLE)
                x_grad[start:end] = scaled_product(few, quantised, grad.dtype, library=library)[: len(rows)]
            if turned is not None:
                operands.append((turned, own.input_again(_padded(x[start:end], multiple), x_scale, True, None)))
            start = end
        weight_grad = None
        if in_fp8 and ctx.main_grad is not None:
            ctx.main_grad.add_computed(
                partial(_products, operands, weight.shape, ctx.main_grad.tensor.dtype, weight.device, library)
            )
        elif in_fp8:
            weight_grad = _products(operands, weight.shape, weight.dtype, weight.device, library)
        elif needs_weight_grad and ctx.main_grad is not None:
            ctx.main_grad.add_grouped_matmul(grad, x, counts, library)
        elif needs_weight_grad:
            weight_grad = grouped_gradient(grad, x, counts, library)
        bias_grad = None
        if needs_bias_grad:
            bias_grad = torch.stack([rows.sum(dim=0) for rows in grad.split_with_sizes(counts)])
        return x_grad, weight_grad, bias_grad, *(None,) * 5


def float8_grouped_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    counts: Sequence[int],
    quantisers: Sequence[Float8Quantisers],
    *,
    adds_bias: bool,
    library: str,
) -> torch.Tensor:
    """Do what `grouped_linear` does, with the three products of each group in fp8.

    Each group has ``quantisers`` of its own. The backward pass keeps the input as it came.

    Shapes: as those of `grouped_linear`.
    """
    arguments = (x, weight, bias, row_counts(counts), adds_bias, library, quantisers, torch.is_grad_enabled())
    result: torch.Tensor = _Float8GroupedLinear.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _summed_multiple(blocks: Blocks, device: str) -> int:
    """Return of how many rows those are a multiple that a weight gradient's product sums over."""
    takes_blocks = device == "cuda" and has_scaled_products(blocks, blocks, device)
    return max(_MULTIPLE, blocks.columns) if takes_blocks else _MULTIPLE


def _first_rows(matrix: Quantised, count: int) -> Quantised:
    if count == len(matrix.data):
        return matrix
    assert matrix.blocks.rows == 1, "rows share scales, and are no more than are asked for"
    return Quantised(matrix.data[:count], matrix.scale[:count], matrix.blocks)


def _padded(rows: torch.Tensor, multiple: int) -> torch.Tensor:
    missing = -len(rows) % multiple
    return F.pad(rows, (0, 0, 0, missing)) if missing else rows


def _products(
    operands: _Operands, shape: torch.Size, dtype: torch.dtype, device: torch.device, library: str
) -> torch.Tensor:
    """Return the gradient of all weights; that of an expert without rows is zero."""
    total = torch.zeros(shape, dtype=dtype, device=device)
    for into, pair in zip(total, operands):
        if pair is not None:
            into.copy_(scaled_product(*pair, dtype, library=library))
    return total
