"""Which parameters the optimizer treats alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from megatron.core.sharding import spec_of


@dataclass(frozen=True)
class ParamGroup:
    """Hold parameters that share a weight decay: the scheduled value times ``weight_decay_multiplier``."""

    parameters: tuple[torch.nn.Parameter, ...]
    weight_decay_multiplier: float


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to everything but biases and one-dimensional parameters."""
    return parameter.dim() > 1 and not name.endswith("bias")


def build_param_groups(parameters: Iterable[torch.nn.Parameter]) -> tuple[ParamGroup, ...]:
    """Return the decayed parameters and then the others, each in the given order; an empty group is left out."""
    decayed: list[torch.nn.Parameter] = []
    others: list[torch.nn.Parameter] = []
    for parameter in parameters:
        (decayed if is_decayed(spec_of(parameter).name, parameter) else others).append(parameter)
    groups = (ParamGroup(tuple(decayed), 1.0), ParamGroup(tuple(others), 0.0))
    return tuple(group for group in groups if group.parameters)
