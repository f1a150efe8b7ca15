"""The interface of models for training, and their wrapper for data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.parallel_state import ParallelState
from megatron.core.sharding import attach_spec, held_of, quantized_of, spec_of
from megatron.core.tensor_parallel import initialize_divided
from megatron.core.transformer import DecoderConfig, TransformerBlock
from megatron.core.weight_prefetch import has_memory


class Model(nn.Module):
    """One chunk of a model, on one pipeline stage.

    A chunk with ``pre_process`` is the first of the model. All other chunks take the hidden states of the previous
    chunk. A chunk with ``post_process`` returns the loss, all others return a message of ``config.message_shape``.
    The arguments of a chunk are defined by the model and its forward step.
    """

    config: DecoderConfig
    pre_process: bool
    post_process: bool
    seed: int | None = None
    """Seed for parameters that were created without memory; without a seed they are initialized to zero."""
    parallel_state: ParallelState | None = None
    """Process groups that divide the generation of initial values; without them each rank generates its own values."""
    auxiliary_loss_names: tuple[str, ...] = ()
    """Names of all reported auxiliary losses of the model, the same on every chunk."""

    @property
    def blocks(self) -> tuple[TransformerBlock, ...]:
        """Return the blocks of layers, whose weights may be freed or offloaded while other layers run."""
        return tuple(module for module in self.modules() if isinstance(module, TransformerBlock))

    @property
    def captures_loss(self) -> bool:
        """Return whether CUDA graphs capture the loss, whose arguments then include ``reduction`` "sum"."""
        return False

    @property
    def first_alone(self) -> nn.Module | None:
        """Return the module before all layers if no other module needs its weights, else None."""
        return None

    def name_parameters(self) -> None:
        """Prefix the parameter names in all `ParamSpec` with the module's path in the model."""
        for module_name, module in self.named_modules():
            for parameter in module.parameters(recurse=False):
                attach_spec(parameter, spec_of(parameter).with_prefix(f"{module_name}."))

    def initialize_parameters(self, seed: int | None, some: Sequence[nn.Parameter] | None = None) -> None:
        """Initialize all parameters, or ``some`` of them; names must be set.

        Values are generated from ``seed``. Without a seed they are zero. On ``meta`` nothing is initialized. If this
        rank holds only parts of a parameter, these parts are initialized. With ``parallel_state`` the generation is
        collective (see `initialize_divided`).
        """
        parameters = list(self.parameters()) if some is None else some
        if seed is None:
            with torch.no_grad():
                for _, held in (each for parameter in parameters for each in held_of(parameter)):
                    held.zero_()
        elif not any(parameter.is_meta for parameter in parameters):
            plain = [parameter for parameter in parameters if quantized_of(parameter) is None]
            initialize_divided(plain, seed, self.parallel_state)
            for parameter in parameters:
                quantized = quantized_of(parameter)
                if quantized is not None:
                    quantized.open()
                    initialize_divided([parameter], seed, self.parallel_state)
                    quantized.close()


def wrap_model(
    model: Model,
    config: DistributedDataParallelConfig,
    state: ParallelState,
    *,
    calculate_per_token_loss: bool = False,
) -> DistributedDataParallel:
    """Wrap a model chunk for data parallelism; with FSDP its blocks gather and free their layers' weights.

    Parameters without memory are initialized here: the whole parameter, or this rank's shard of it.
    """
    unfilled = [parameter for parameter in model.parameters() if not has_memory(parameter)]
    wrapped = DistributedDataParallel(
        model,
        config,
        state,
        calculate_per_token_loss=calculate_per_token_loss,
        layers=[layer for block in model.blocks for layer in block.layers.values()],
        first=model.first_alone,
        # Offloaded weights free their own memory.
        flat_weights=not model.config.cpu_offloading_weights,
    )
    if unfilled:
        model.initialize_parameters(model.seed, unfilled)
    for block in model.blocks if wrapped.weights is not None else ():
        block.weights = wrapped.weights
    return wrapped
