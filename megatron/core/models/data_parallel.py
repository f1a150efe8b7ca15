"""A model in data parallelism, its layers told apart: their weights may be sharded and gathered one by one."""

from __future__ import annotations

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.distributed.distributed_data_parallel_config import DistributedDataParallelConfig
from megatron.core.models.model import Model
from megatron.core.parallel_state import ParallelState
from megatron.core.weight_prefetch import has_memory


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
