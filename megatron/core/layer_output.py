"""Outputs of a layer: hidden states and auxiliary losses, such as the load-balancing losses of a router.

`MoEAuxLossAutoScaler` is megatron-core's way to train auxiliary losses, for modules that return tensors only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch


@dataclass(frozen=True)
class AuxiliaryLoss:
    """Sum of a layer's auxiliary loss over a micro-batch, and the number of tokens in the sum.

    Training minimizes ``coefficient`` times the mean in addition to the model's own loss; 0 makes it a metric, which is
    only reported. With ``calculate_per_token_loss`` the sum is divided by the number of tokens of the model's own loss
    instead. The report averages losses of the same name over layers, micro-batches and replicas. The value is equal on
    all tensor-parallel ranks. Under context parallelism it covers only this rank's tokens. A loss that is not a sum
    over tokens is multiplied by their number.

    Shapes: both tensors ``[]``; the sum in at least float32, differentiable.
    """

    name: str
    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    coefficient: float


class LayerOutput(NamedTuple):
    """Hidden states and auxiliary losses of a layer, a part of a layer, or several layers in a row."""

    hidden: torch.Tensor
    losses: tuple[AuxiliaryLoss, ...] = ()


class MoEAuxLossAutoScaler(torch.autograd.Function):
    """Return the output unchanged, and start a backward pass from an auxiliary loss when the output gets a gradient.

    The gradient of the loss is the process-wide loss scale, which `set_loss_scale` sets.
    """

    main_loss_backward_scale: ClassVar[torch.Tensor | None] = None

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, aux_loss: torch.Tensor) -> torch.Tensor:
        """Return ``output`` and remember ``aux_loss`` for the backward pass."""
        ctx.save_for_backward(aux_loss)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the gradients of the output and of the auxiliary loss."""
        (aux_loss,) = ctx.saved_tensors
        scale = MoEAuxLossAutoScaler.main_loss_backward_scale
        return grad_output, torch.ones_like(aux_loss) if scale is None else torch.ones_like(aux_loss) * scale

    @staticmethod
    def set_loss_scale(scale: torch.Tensor) -> None:
        """Set the scale of the gradients of all auxiliary losses."""
        MoEAuxLossAutoScaler.main_loss_backward_scale = scale
