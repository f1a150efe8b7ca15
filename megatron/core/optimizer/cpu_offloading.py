"""Optimizer CPU offload: a part of the main parameters and of the state is stored and updated in host memory.

Ren et al. 2021, https://arxiv.org/abs/2101.06840.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch

from megatron.core.distributed import PARAM_ALIGNMENT, ParamShard, round_up
from megatron.core.host_memory import Copied, HostCopies
from megatron.core.optimizer.optimizer_config import OptimizerConfig
from megatron.core.optimizer.update_bucket import ShardGroup, UpdateBucket, split_shard

_NUM_SLOTS = 2
_ALIGNMENT = 128


class _Slots:
    """Host staging buffers that buckets use in turn, with one view per shard in the dtype of the copied tensor.

    ``reach`` waits until the previous use of a bucket's slot has finished.
    """

    def __init__(
        self,
        copies: HostCopies,
        buckets: Sequence[UpdateBucket],
        copied: Callable[[ParamShard], torch.Tensor],
        count: int,
        is_pinned: bool,
    ) -> None:
        self._copies = copies
        plans = [_plan([copied(optimized.shard) for optimized in bucket.shards]) for bucket in buckets]
        size = max(end for _, end in plans)
        like = copied(buckets[0].shards[0].shard)
        # Created from a device tensor, so that a dry run creates memory without values.
        self.memory = [
            torch.empty_like(like[:0], dtype=torch.uint8, device="cpu").new_empty(size, pin_memory=is_pinned)
            for _ in range(count)
        ]
        self._plans = [places for places, _ in plans]
        self._last: list[Copied | None] = [None] * count

    def views(self, number: int) -> list[torch.Tensor]:
        """Return the staging memory of each shard of a bucket."""
        memory = self.memory[number % len(self.memory)]
        return [memory[start:end].view(dtype) for start, end, dtype in self._plans[number]]

    def use(self, number: int, last: Copied) -> None:
        """Record the last copy of a bucket."""
        self._last[number % len(self._last)] = last

    def reach(self, number: int) -> None:
        """Wait for the last copy in a bucket's slot."""
        last = self._last[number % len(self._last)]
        if last is not None:
            self._copies.wait_on_host(last)


def _plan(tensors: Sequence[torch.Tensor]) -> tuple[list[tuple[int, int, torch.dtype]], int]:
    """Return the byte range and dtype of each tensor in a slot, and the size of the slot."""
    places, position = [], 0
    for tensor in tensors:
        places.append((position, position + tensor.nbytes, tensor.dtype))
        position = round_up(position + tensor.nbytes, _ALIGNMENT)
    return places, position


class HostOffload:
    """Update buckets on the host: copy their gradients, update the main parameters, and copy the weights back.

    With ``overlap_cpu_optimizer_d2h_h2d`` the gradients of the next buckets and the weights of the previous buckets are
    copied while a bucket is updated; the first gradients are copied while the device updates its own part. Without it,
    all steps are sequential. At most two buckets' gradients and two buckets' weights are in flight. ``copies`` counts
    their bytes.
    """

    def __init__(self, config: OptimizerConfig, buckets: Sequence[UpdateBucket], copies: HostCopies) -> None:
        self.buckets = tuple(buckets)
        self.copies = copies
        self._overlaps = config.overlap_cpu_optimizer_d2h_h2d
        count = _NUM_SLOTS if self._overlaps else 1
        on_cuda = buckets[0].shards[0].shard.values.is_cuda
        pins_gradients, pins_values = on_cuda and config.pin_cpu_grads, on_cuda and config.pin_cpu_params
        self._gradients = _Slots(copies, self.buckets, lambda shard: shard.gradient, count, pins_gradients)
        self._values = _Slots(copies, self.buckets, lambda shard: shard.values, count, pins_values)
        self._count = count

    @property
    def staging_bytes(self) -> int:
        """Return the size of the host memory that stages gradients and weights."""
        return sum(memory.nbytes for slots in (self._gradients, self._values) for memory in slots.memory)

    def begin(self) -> None:
        """Start copying the first gradients, if copies overlap."""
        if self._overlaps:
            for number in range(min(self._count, len(self.buckets))):
                self._fetch(number)

    def finish(self, is_finite: torch.Tensor, grad_multiplier: torch.Tensor) -> None:
        """Update every bucket from its gradients times a factor, if they are finite; the host waits for this flag.

        Work launched on the device afterwards waits for the weights.

        Shapes: ``is_finite, grad_multiplier: []``.
        """
        finite, multiplier = torch.stack((is_finite.to(torch.float64), grad_multiplier)).tolist()
        if not finite:
            return
        last: Copied | None = None
        for number, bucket in enumerate(self.buckets):
            if not self._overlaps:
                self._fetch(number)
            self._gradients.reach(number)
            bucket.step(self._gradients.views(number), multiplier)
            if self._overlaps and number + self._count < len(self.buckets):
                self._fetch(number + self._count)
            last = self._send(number)
            if not self._overlaps:
                self._values.reach(number)
        if last is not None:
            self.copies.wait(last)

    def _fetch(self, number: int) -> None:
        shards, views = self.buckets[number].shards, self._gradients.views(number)
        fetched = [self.copies.to_host(optimized.shard.gradient, view) for optimized, view in zip(shards, views)]
        self._gradients.use(number, fetched[-1])

    def _send(self, number: int) -> Copied:
        bucket, views = self.buckets[number], self._values.views(number)
        self._values.reach(number)
        torch._foreach_copy_(views, bucket.main_params)
        sent = [self.copies.to_device(view, optimized.shard.values) for optimized, view in zip(bucket.shards, views)]
        self._values.use(number, sent[-1])
        return sent[-1]


def split_groups(groups: Iterable[ShardGroup], fraction: float) -> tuple[list[ShardGroup], list[ShardGroup]]:
    """Split shards into those on the host, the first ``fraction`` of all elements, and those on the device.

    The shard at the boundary is split at a multiple of the parameters' alignment.
    """
    groups = [(shards, multiplier) for shards, multiplier in groups if shards]
    total = sum(shard.end - shard.start for shards, _ in groups for shard in shards)
    left = round_up(round(fraction * total), PARAM_ALIGNMENT)
    on_host: list[ShardGroup] = []
    on_device: list[ShardGroup] = []
    for shards, multiplier in groups:
        host_shards: list[ParamShard] = []
        device_shards: list[ParamShard] = []
        for shard in shards:
            length = shard.end - shard.start
            if 0 < left < length:
                first, shard = split_shard(shard, left)
                host_shards.append(first)
                left = 0
            (host_shards if left > 0 else device_shards).append(shard)
            left -= min(left, length)
        on_host += [(host_shards, multiplier)] if host_shards else []
        on_device += [(device_shards, multiplier)] if device_shards else []
    return on_host, on_device
