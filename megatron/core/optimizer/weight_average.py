"""Exponential moving average (EMA) of the weights, stored on the device of the main parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron.core.optimizer.update_bucket import OptimizedShard, UpdateBucket

AVERAGE = "ema"
"""The name of this state in a checkpoint."""


class WeightAverage:
    """Moving average of main parameters: after each update average = decay · average + (1 - decay) · weight.

    Averages are float32 (float64 for a float64 model), start as the weights, and are sharded like the optimizer state.
    """

    def __init__(self, buckets: Sequence[UpdateBucket], decay: float) -> None:
        self._buckets = tuple(buckets)
        self._decay = decay
        self._averages = {
            # A quantized main parameter has no elements between two steps.
            id(optimized): optimized.main_param.new_empty(optimized.shard.values.shape)
            for bucket in buckets
            for optimized in bucket.shards
        }
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Restart from the current weights."""
        for bucket in self._buckets:
            with bucket.main_params_open():
                for optimized in bucket.shards:
                    self._averages[id(optimized)].copy_(optimized.main_param)

    def follow(self, is_updated: torch.Tensor) -> None:
        """Update the average from the main parameters if ``is_updated`` is true; otherwise change nothing.

        Shapes: ``is_updated: []`` of bool.
        """
        for bucket in self._buckets:
            with bucket.main_params_open():
                for optimized in bucket.shards:
                    average = self._averages[id(optimized)]
                    share = (is_updated.double() * (1.0 - self._decay)).to(average.device, average.dtype)
                    average.lerp_(optimized.main_param, share)

    def of(self, optimized: OptimizedShard) -> torch.Tensor:
        """Return the average of a shard; shapes: ``-> [n]``."""
        return self._averages[id(optimized)]

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Replace this rank's shards of the model's weights by the averages inside the context."""
        updated = [optimized for bucket in self._buckets for optimized in bucket.shards]
        kept = [optimized.shard.values.clone() for optimized in updated]
        for optimized in updated:
            optimized.shard.values.copy_(self.of(optimized))
        yield
        for optimized, values in zip(updated, kept, strict=True):
            optimized.shard.values.copy_(values)
