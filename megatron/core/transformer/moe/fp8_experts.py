"""Feed-forward layers of experts in FP8 with a scale per row: each GEMM of all experts is one launch.

The rows of all experts stay padded between the two linear layers. The activation is quantized as it is computed, and
so is the gradient of its input, so that neither is written in 16 bits. The backward pass recomputes the activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from megatron.core.main_grad import MainGrad, main_grad_of
from megatron.core.ops import (
    Fp8Quantizers,
    PaddedGroups,
    QuantizedGroups,
    add_groups,
    combine_rows,
    grouped_scaled_product,
    quantize_activated,
    quantize_activation_gradient,
    unfinished_scaled_gradient,
    weights_gradient,
)
from megatron.core.transformer.moe.expert_dispatch import LateGradients


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """The weights of a linear layer of all experts, and their quantizers. Shapes: ``weight: [experts, out, in]``."""

    weight: torch.Tensor
    quantizers: Fp8Quantizers


class _Float8Experts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        first_weight: torch.Tensor,
        second_weight: torch.Tensor,
        weights: torch.Tensor | None,
        quantizers: tuple[Fp8Quantizers, Fp8Quantizers],
        activation: Callable[[torch.Tensor], torch.Tensor],
        groups: PaddedGroups,
        late: LateGradients | None,
    ) -> torch.Tensor:
        first, second = quantizers
        rows = groups.quantize(x, is_padded=False, plain=True, transpose=False)
        inner = grouped_scaled_product(
            rows, first.weight_of_groups(first_weight, transpose=False), groups.ends, transpose=False
        )
        activated = quantize_activated(inner, groups, activation, plain=True, transpose=False)
        output = grouped_scaled_product(
            activated, second.weight_of_groups(second_weight, transpose=False), groups.ends, transpose=False
        )
        # The gradients of the routing weights need the output.
        kept = None if weights is None else output
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, inner, kept, first_weight, second_weight, weights)
        ctx.quantizers, ctx.activation, ctx.groups, ctx.late = quantizers, activation, groups, late
        # Looked up here: under recomputation the backward pass sees copies of the weights without main gradients.
        ctx.main_grads = main_grad_of(first_weight), main_grad_of(second_weight)
        if weights is None:
            return groups.sum_rows(output)
        return combine_rows(output, weights, groups.order, output.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, inner, output, first_weight, second_weight, weights = ctx.saved_tensors
        groups: PaddedGroups = ctx.groups
        first, second = ctx.quantizers
        needs_x_grad, needs_first_grad, needs_second_grad, needs_weights_grad = ctx.needs_input_grad[:4]
        needs_inner_grad = needs_x_grad or needs_first_grad
        weights_grad = weights_gradient(grad, output, weights, groups.order) if needs_weights_grad else None
        forms = {"plain": needs_inner_grad, "transpose": needs_second_grad}
        rows = groups.quantize(grad, is_padded=False, weights=weights, **forms)
        x_grad = first_grad = second_grad = inner_rows = None
        if needs_inner_grad:
            turned = second.weight_of_groups(second_weight, transpose=True)
            inner_rows, activated = quantize_activation_gradient(
                grouped_scaled_product(rows, turned, groups.ends, transpose=True),
                *(inner, groups, ctx.activation),
                plain=needs_x_grad,
                transpose=needs_first_grad,
                activated=needs_second_grad,
            )
        elif needs_second_grad:
            activated = quantize_activated(inner, groups, ctx.activation, plain=False, transpose=True)
        if needs_second_grad:
            add = partial(_add_gradients, rows, activated, groups)
            second_grad = _received(ctx.main_grads[1], add, second_weight, ctx.late)
        if needs_x_grad:
            assert inner_rows is not None
            turned = first.weight_of_groups(first_weight, transpose=True)
            x_grad = groups.sum_rows(grouped_scaled_product(inner_rows, turned, groups.ends, transpose=True))
        if needs_first_grad:
            assert inner_rows is not None
            add = partial(_add_gradients_of_tokens, inner_rows, x.detach(), groups)
            first_grad = _received(ctx.main_grads[0], add, first_weight, ctx.late)
        return x_grad, first_grad, second_grad, weights_grad, *(None,) * 4


def float8_experts(
    x: torch.Tensor,
    first: ExpertWeights,
    second: ExpertWeights,
    activation: Callable[[torch.Tensor], torch.Tensor],
    groups: PaddedGroups,
    weights: torch.Tensor | None,
    *,
    late: LateGradients | None,
) -> torch.Tensor:
    """Apply the experts' two linear layers with the activation between them to tokens in the order of ``groups``.

    Returns the sum of each token's rows, weighted if there are ``weights`` of its choices. If ``late`` is given, the
    backward pass appends the additions to the weights' main gradients to it, and the caller runs them later in the same
    backward pass.

    Shapes: ``x: [n, h]``, ``weights: [n, c] -> [n, h]``.
    """
    quantizers = first.quantizers, second.quantizers
    arguments = (x, first.weight, second.weight, weights, quantizers, activation, groups, late)
    result: torch.Tensor = _Float8Experts.apply(*arguments)  # type: ignore[no-untyped-call]
    return result


def _received(
    main_grad: MainGrad | None,
    add: Callable[[torch.Tensor, bool], None],
    weight: torch.Tensor,
    late: LateGradients | None,
) -> torch.Tensor | None:
    """Add a weight's gradient to its main gradient, now or by ``late``, or return it if there is no main gradient."""
    if main_grad is None:
        grad = torch.empty_like(weight)
        add(grad, True)
        return grad
    if late is None:
        main_grad.add_by(add)
    else:
        late.append(partial(main_grad.add_by, add))
    return None


def _add_gradients(
    grad: QuantizedGroups, rows: QuantizedGroups, groups: PaddedGroups, total: torch.Tensor, overwrite: bool
) -> None:
    """Add the gradient of each group's weight to ``total``, or overwrite it."""
    add_groups(total, unfinished_scaled_gradient(grad, rows, groups.ends), groups.ends, overwrite=overwrite)


def _add_gradients_of_tokens(
    grad: QuantizedGroups, x: torch.Tensor, groups: PaddedGroups, total: torch.Tensor, overwrite: bool
) -> None:
    _add_gradients(grad, groups.quantize(x, is_padded=False, plain=False, transpose=True), groups, total, overwrite)
