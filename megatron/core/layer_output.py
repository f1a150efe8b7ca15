"""What a layer leaves besides hidden states: auxiliary losses, such as those that balance a router's load."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch


@dataclass(frozen=True)
class AuxiliaryLoss:
    """Hold a micro-batch's sum of a further loss of some layer, and the number of tokens that it runs over.

    Training minimises ``coefficient`` times its mean, added to the model's own loss; 0 makes it a metric, which is only
    reported. With ``calculate_per_token_loss`` its sum is divided by the number of tokens of the model's own loss, in
    place of its own. Losses of one name are averaged over layers, micro-batches and replicas in the report. The value
    is equal on the tensor-parallel ranks. Under context parallelism it is that of this rank's own tokens. A loss that
    is no sum over tokens is multiplied by their number.

    Shapes: both tensors ``[]``; the sum in at least float32, differentiable.
    """

    name: str
    loss_sum: torch.Tensor
    num_tokens: torch.Tensor
    coefficient: float


class LayerOutput(NamedTuple):
    """Hold the hidden states that a layer, a part of one, or several in a row leave, and their auxiliary losses."""

    hidden: torch.Tensor
    losses: tuple[AuxiliaryLoss, ...] = ()
