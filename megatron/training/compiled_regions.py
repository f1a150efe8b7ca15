"""Pure functions of a model's layers compiled by torch.compile: norms and activations (``--compile``)."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch

from megatron.core.errors import ConfigurationError
from megatron.core.models.model import Model
from megatron.core.ops.triton_support import runs_on_triton
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.norm import Norm, normalise
from megatron.training.config.run_config import RunConfig

_FAILURES = (RuntimeError, ImportError, OSError, AttributeError, subprocess.SubprocessError)
"""What torch.compile raises where it has no compiler, or one that fails; its own errors are RuntimeErrors."""


def compile_regions(chunks: Sequence[Model], config: RunConfig, log: Callable[[str], None]) -> None:
    """Compile the norms and activations of all layers, and say how long that took.

    Each is run forward and backward once with what a micro-batch brings, so that a failure is found here. Activations
    whose gradients Triton computes, gated ones and those behind a bias, stay as they are.

    Raises:
        ConfigurationError: torch.compile fails.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    norms = [module for module in modules if isinstance(module, Norm)]
    mlps = [module for module in modules if isinstance(module, MLP)]
    start_time = time.perf_counter()
    try:
        compiled_norm = torch.compile(normalise, dynamic=False)
        for norm in norms:
            norm.compute = compiled_norm
        for mlp in mlps[:1]:
            activation = mlp.activation
            fc1 = mlp.linear_fc1
            is_on_triton = (
                runs_on_triton(fc1.weight) if mlp.is_gated else fc1.bias is not None and mlp.has_program(fc1.weight)
            )
            if not is_on_triton:
                activation = torch.compile(activation, dynamic=False)
            for other in mlps:
                other.activation = activation
        for function, shape, weight in _first_calls(norms, mlps, config):
            x = torch.zeros(shape, dtype=weight.dtype, device=weight.device, requires_grad=True)
            # Gradients of the parameters are computed too, and nobody keeps them.
            output = function(x)
            torch.autograd.grad(output, x, torch.zeros_like(output))
    except _FAILURES as error:
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigurationError(f"--compile: torch.compile failed here ({reason}); leave --compile out") from error
    log(f" > compiled norms and activations in {time.perf_counter() - start_time:.1f} s (--compile)")


def _first_calls(
    norms: Sequence[Norm], mlps: Sequence[MLP], config: RunConfig
) -> Iterator[tuple[Callable[[torch.Tensor], Any], tuple[int, ...], torch.Tensor]]:
    """Yield one call of each kind: function, shape of its input, and a weight of its dtype and device."""
    model, tp = config.model, config.model.tensor_model_parallel_size
    *rows, hidden_size = model.hidden_shape(config.data.seq_length, config.training.micro_batch_size)
    seen = set[tuple[int, ...]]()
    for norm in norms:
        shape = (*rows, *norm.shape)
        if norm.shape != (hidden_size,):
            length = config.data.seq_length // model.context_parallel_size
            shape = (length, rows[1], model.num_attention_heads // tp, *norm.shape)
        if shape not in seen:
            seen.add(shape)
            # A norm of the residual stream gives the stream too.
            yield partial(Norm.forward, norm), shape, norm.weight
    for mlp in mlps[:1]:
        width = mlp.linear_fc1.weight.shape[0]
        length = config.data.seq_length // model.context_parallel_size
        yield mlp.activation, (length, rows[1], width), mlp.linear_fc1.weight
