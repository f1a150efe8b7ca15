"""GEMMs of a feed-forward layer with the activation, or its derivative, fused into their epilogues."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from megatron.core.ops.gemm import linear
from megatron.core.ops.triton_support import runs_on_triton


class FusedActivation(NamedTuple):
    """Activation between two linear layers that their GEMMs compute.

    ``kind`` is its name in ``PLAIN_KINDS`` of `megatron.core.ops.triton`. ``sums_rows`` says that the first layer has a
    bias with a gradient.
    """

    function: Callable[[torch.Tensor], torch.Tensor]
    kind: str
    sums_rows: bool


def linear_with_activation(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: FusedActivation,
    *,
    keeps_input: bool,
    library: str = "auto",
) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Compute ``x @ weight.T + bias`` and its activation; without ``keeps_input`` the first result is None.

    On Triton one kernel computes both. Autograd does not record the operation.

    Shapes: ``x: [..., in]``, ``weight: [out, in]``, ``bias: [out] -> [..., out]`` twice.
    """
    if _is_on_triton(x, weight):
        from megatron.core.ops.triton import linear_with_activation as on_triton

        return on_triton(x, weight, bias, activation.kind, keeps_input=keeps_input)
    inner = linear(x, weight, bias, library)
    return inner if keeps_input else None, activation.function(inner)


def activation_input_gradient(
    grad: torch.Tensor, weight: torch.Tensor, inner: torch.Tensor, activation: FusedActivation, library: str = "auto"
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the gradient of the activation's input from the gradient of the second layer's output.

    On Triton one kernel computes it, and with ``sums_rows`` its sums over parts of the rows. Otherwise the second
    result is None.

    Shapes: ``grad: [..., out]``, ``weight: [out, in]``, ``inner: [..., in] -> [..., in]``, ``[1, parts, in]`` float32.
    """
    if _is_on_triton(grad, weight, inner):
        from megatron.core.ops.triton import activation_input_gradient as on_triton

        return on_triton(grad, weight, inner, activation.kind, sums_rows=activation.sums_rows)
    x_grad = linear(grad, weight.t(), library=library)
    with torch.enable_grad():
        leaf = inner.detach().requires_grad_()
        return torch.autograd.grad(activation.function(leaf), leaf, x_grad)[0], None


def _is_on_triton(x: torch.Tensor, *others: torch.Tensor) -> bool:
    return x.numel() > 0 and runs_on_triton(x, *others)
