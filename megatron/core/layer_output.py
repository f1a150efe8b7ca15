"""Outputs of a layer: hidden states and auxiliary losses, such as the load-balancing losses of a router."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

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
