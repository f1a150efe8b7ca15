"""The distributed optimizer: each data-parallel rank keeps the state of its shards only, and updates only those.

Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.core.distributed.distributed_data_parallel import DistributedDataParallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.parallel_state import ParallelState


class DistributedOptimizer(MegatronOptimizer):
    """Update this rank's shards of the parameters, then gather the parameters from all ranks' shards.

    The model chunks are sharded (see `DistributedDataParallel`): a rank has the reduced gradients, main parameters and
    moments of its shards alone. The gradient norm and the check for finite gradients go over all ranks. The update is
    the same arithmetic, element by element. The state is described in boxes of the global tensors, so that it loads at
    any data-parallel size and without sharding.

    With d ranks, weights, gradients and state take 6 + 12/d bytes a parameter in bfloat16, or 2 + 16/d and the pool of
    full-size buckets where gradients are sharded too.
    """

    def _update(self, is_finite: torch.Tensor, grad_multiplier: torch.Tensor) -> None:
        for chunk in self._chunks:
            # A module that no forward pass has called has not waited for its parameters.
            chunk.finish_param_gather()
        super()._update(is_finite, grad_multiplier)
        with self._timers("params-all-gather", log_level=1):
            for chunk in self._chunks:
                chunk.start_param_gather()


def make_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[DistributedDataParallel],
    state: ParallelState,
    fused_adam: type[torch.optim.Optimizer] | None = None,
) -> MegatronOptimizer:
    """Return the distributed optimizer for sharded model chunks, the plain one for others."""
    kind = DistributedOptimizer if any(chunk.is_sharded for chunk in model_chunks) else MegatronOptimizer
    return kind(config, model_chunks, state, fused_adam)
