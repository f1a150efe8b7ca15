"""Parameters without memory: shape, dtype and device are there, values come when somebody has room for them."""

from __future__ import annotations

import torch
from torch import nn


def take_memory(module: nn.Module) -> None:
    """Free the memory of every parameter of a module; their values are lost."""
    for parameter in module.parameters():
        parameter.untyped_storage().resize_(0)


def has_memory(parameter: torch.Tensor) -> bool:
    """Return whether a parameter has memory for its values; one without elements, or on ``meta``, needs none."""
    return parameter.is_meta or not parameter.numel() or parameter.untyped_storage().nbytes() > 0


def give_memory(parameter: torch.Tensor) -> None:
    """Give a parameter without memory its own, with any content; leave every other one as it is."""
    if not has_memory(parameter):
        parameter.untyped_storage().resize_(parameter.numel() * parameter.element_size())
