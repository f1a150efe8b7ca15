"""The distributed optimizer (ZeRO-1): each data-parallel rank keeps the state of its shards, and updates only them.

Rajbhandari et al. 2020, https://arxiv.org/abs/1910.02054.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from megatron.core.distributed import DistributedDataParallel
from megatron.core.host_memory import HostCopies
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_bucket import ShardGroup, UpdateBucket
from megatron.core.parallel_state import ParallelState


class DistributedOptimizer(MegatronOptimizer):
    """Update this rank's shards of the parameters, then all-gather the parameters.

    The model chunks are sharded (see `DistributedDataParallel`): a rank has the reduced gradients, main parameters and
    moments of its own shards only. The gradient norm and the check for finite gradients cover all ranks. The
    elementwise arithmetic is the same as without sharding. The state is described by boxes of the global tensors, so
    that it can be loaded at any data-parallel size and without sharding.

    With d ranks, weights, gradients and state take 6 + 12/d bytes per parameter in bfloat16, or 2 + 16/d plus the pool
    of full-size buckets if gradients are sharded too.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        model_chunks: Sequence[DistributedDataParallel],
        state: ParallelState,
        fused_adam: type[torch.optim.Optimizer] | None = None,
        host_copies: Callable[[], HostCopies] = HostCopies,
    ) -> None:
        super().__init__(config, model_chunks, state, fused_adam, host_copies)
        buckets_of: dict[int, list[UpdateBucket]] = {}
        for bucket in filter(lambda bucket: bucket.shards, self._on_device):
            buckets_of.setdefault(id(bucket.shards[0].shard.parameter), []).append(bucket)
        # The all-gathers in the order that all ranks share, each with the buckets that this rank updates before it.
        self._gathers = [
            ([bucket for shard in shards for bucket in buckets_of.pop(id(shard.parameter), ())], gather)
            for chunk in self._gathering_chunks()
            for shards, gather in chunk.shards_and_gathers()
        ]
        overlaps = any(chunk.config.overlap_param_gather for chunk in self._chunks)
        self._gathers_in_forward = overlaps and not self._gathers
        assert not (self._gathers and self.offload), "what the host updates is not in the order of the gathers"

    def _update(self, is_finite: torch.Tensor, grad_multipliers: Mapping[str, torch.Tensor]) -> None:
        for chunk in self._chunks:
            # A module that no forward pass has called has not waited for its parameters.
            chunk.finish_param_gather()
        if self._gathers:
            self._update_by_gather(is_finite, grad_multipliers)
            return
        super()._update(is_finite, grad_multipliers)
        if not self._gathers_in_forward:
            self._start_gathers()

    @torch.no_grad()
    def begin_param_gather(self) -> None:
        """Start the all-gathers for the next forward pass, if they are overlapped with it.

        If they started with the update, they would delay the collectives after it, which the host waits for.
        """
        if self._gathers_in_forward:
            self._start_gathers()

    def _start_gathers(self) -> None:
        with self._timers("params-all-gather", log_level=1):
            for chunk in self._chunks:
                chunk.start_param_gather()

    def _update_by_gather(self, is_finite: torch.Tensor, grad_multipliers: Mapping[str, torch.Tensor]) -> None:
        """Update the buckets of each all-gather in turn; an all-gather overlaps with the next bucket's update."""
        if not all(bucket.inner.decides_on_device for bucket in self._on_device):
            # The host reads these for each bucket, and must not wait for the updates of earlier buckets.
            is_finite = is_finite.cpu()
            grad_multipliers = {kind: multiplier.cpu() for kind, multiplier in grad_multipliers.items()}
        for number, (buckets, gather) in enumerate(self._gathers):
            self._step_buckets(f"update {number}", buckets, is_finite, grad_multipliers)
            gather()

    def _device_buckets(self, groups: list[ShardGroup]) -> Iterator[list[ShardGroup]]:
        if not self._gathering_chunks():
            yield from super()._device_buckets(groups)
            return
        for chunk in self._gathering_chunks():
            for gathered, _ in chunk.shards_and_gathers():
                mine = {id(shard.parameter) for shard in gathered}
                own = [
                    ([shard for shard in shards if id(shard.parameter) in mine], factor) for shards, factor in groups
                ]
                yield from super()._device_buckets([(shards, factor) for shards, factor in own if shards])

    def _gathering_chunks(self) -> list[DistributedDataParallel]:
        return [chunk for chunk in self._chunks if chunk.gathers_while_updating]


def make_optimizer(
    config: OptimizerConfig,
    model_chunks: Sequence[DistributedDataParallel],
    state: ParallelState,
    fused_adam: type[torch.optim.Optimizer] | None = None,
    host_copies: Callable[[], HostCopies] = HostCopies,
) -> MegatronOptimizer:
    """Create the distributed optimizer for sharded model chunks, otherwise the plain optimizer."""
    kind = DistributedOptimizer if any(chunk.is_sharded for chunk in model_chunks) else MegatronOptimizer
    return kind(config, model_chunks, state, fused_adam, host_copies)
