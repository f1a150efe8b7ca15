"""The interface that training requires of a model, and its wrapper for data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.sharding import attach_spec, held_of, spec_of
from megatron.core.tensor_parallel import initialize_divided
from megatron.core.transformer import TransformerBlock, TransformerConfig
from megatron.core.weight_prefetch import has_memory


class Model(nn.Module):
    """Be one chunk of a model, on one pipeline stage.

    A chunk with ``pre_process`` begins the model. Every other one is given the hidden states of the chunk before. A
    chunk with ``post_process`` ends in the loss, every other one in hidden states of ``config.hidden_shape``. How a
    chunk is called is between the model and its forward step.
    """

    config: TransformerConfig
    pre_process: bool
    post_process: bool
    seed: int | None = None
    """What the first values are drawn from, zeros without it, of parameters that were made without memory."""
    parallel_state: ParallelState | None = None
    """The groups of ranks that divide the drawing of initial values; without it each rank draws its own."""
    auxiliary_loss_names: tuple[str, ...] = ()
    """Names of the whole model's auxiliary losses that are reported, the same on every chunk."""

    @property
    def blocks(self) -> tuple[TransformerBlock, ...]:
        """Return the blocks of layers, whose weights may be elsewhere while other layers run."""
        return tuple(module for module in self.modules() if isinstance(module, TransformerBlock))

    @property
    def first_alone(self) -> nn.Module | None:
        """Return what runs before all layers, if its backward pass and all else do without its weights."""
        return None

    def name_parameters(self) -> None:
        """Put each module's place in the model before the names in its parameters' descriptions."""
        for module_name, module in self.named_modules():
            for parameter in module.parameters(recurse=False):
                attach_spec(parameter, spec_of(parameter).with_prefix(f"{module_name}."))

    def initialize_parameters(self, seed: int | None, some: Sequence[nn.Parameter] | None = None) -> None:
        """Give the named parameters, or ``some`` of them, their first values.

        They are drawn from ``seed``, or zeros without one; on ``meta`` there are none. Of a parameter that this rank
        holds in parts the parts are filled. With ``parallel_state`` a drawing is collective, see `initialize_divided`.
        """
        parameters = list(self.parameters()) if some is None else some
        if seed is None:
            with torch.no_grad():
                for _, held in (each for parameter in parameters for each in held_of(parameter)):
                    held.zero_()
        elif not any(parameter.is_meta for parameter in parameters):
            initialize_divided(parameters, seed, self.parallel_state)


def wrap_model(
    model: Model,
    config: DistributedDataParallelConfig,
    state: ParallelState,
    *,
    calculate_per_token_loss: bool = False,
) -> DistributedDataParallel:
    """Wrap a model chunk; where weights are sharded, its blocks have them while their layers run.

    Parameters without memory have their first values then: all of a parameter, or what this rank holds of it.
    """
    unfilled = [parameter for parameter in model.parameters() if not has_memory(parameter)]
    wrapped = DistributedDataParallel(
        model,
        config,
        state,
        calculate_per_token_loss=calculate_per_token_loss,
        layers=[layer for block in model.blocks for layer in block.layers.values()],
        first=model.first_alone,
    )
    if unfilled:
        model.initialize_parameters(model.seed, unfilled)
    for block in model.blocks if wrapped.weights is not None else ():
        block.weights = wrapped.weights
    return wrapped
