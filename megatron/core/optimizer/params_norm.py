"""The norm of all parameters of the model, each counted once."""

from __future__ import annotations

import math

import torch

from megatron.core.collectives import all_reduce
from megatron.core.optimizer.clip_grads import is_counted
from megatron.core.parallel_state import ParallelState
from megatron.core.precision import arithmetic_dtype
from megatron.core.sharding import spec_of


@torch.no_grad()
def parameter_norm(module: torch.nn.Module, state: ParallelState) -> float:
    """Return the Euclidean norm over the whole model; every rank of the model-parallel group must call."""
    counted = [parameter for parameter in module.parameters() if is_counted(spec_of(parameter), state)]
    total = torch.zeros((), dtype=torch.float64, device=next(module.parameters()).device)
    for parameter in counted:
        norm = torch.linalg.vector_norm(parameter, dtype=arithmetic_dtype(parameter.dtype))
        total += norm.double().square()
    all_reduce(total, state.model_parallel)
    return math.sqrt(total.item())
