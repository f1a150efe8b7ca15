"""Exponential moving average (EMA) of the weights, stored where the main parameters are stored."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron.core.optimizer.update_bucket import OptimizedPart, UpdateBucket

AVERAGE = "ema"
"""The kind of state as a checkpoint names it."""


class WeightAverage:
    """Follow the main parameters of buckets: after each update an average keeps ``decay`` of itself.

    Averages are float32 (float64 of a float64 model), begin as the weights, and are sharded as the state is.
    """

    def __init__(self, buckets: Sequence[UpdateBucket], decay: float) -> None:
        self._buckets = tuple(buckets)
        self._decay = decay
        self._averages = {
            # A main parameter of few bytes has no elements between two steps.
            id(part): part.main_param.new_empty(part.part.values.shape)
            for bucket in buckets
            for part in bucket.parts
        }
        self.restart()

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew with the weights as they are."""
        for bucket in self._buckets:
            with bucket.main_params_open():
                for part in bucket.parts:
                    self._averages[id(part)].copy_(part.main_param)

    def follow(self, is_updated: torch.Tensor) -> None:
        """Move towards the main parameters where ``is_updated`` is true, and change nothing where it is not.

        Shapes: ``is_updated: []`` of bool.
        """
        for bucket in self._buckets:
            with bucket.main_params_open():
                for part in bucket.parts:
                    average = self._averages[id(part)]
                    share = (is_updated.double() * (1.0 - self._decay)).to(average.device, average.dtype)
                    average.lerp_(part.main_param, share)

    def of(self, part: OptimizedPart) -> torch.Tensor:
        """Return the average of a part. Shapes: ``-> [n]``."""
        return self._averages[id(part)]

    @contextmanager
    def in_place_of_weights(self) -> Iterator[None]:
        """Let this rank's parts of the model be the averages inside."""
        parts = [part for bucket in self._buckets for part in bucket.parts]
        kept = [part.part.values.clone() for part in parts]
        for part in parts:
            part.part.values.copy_(self.of(part))
        yield
        for part, values in zip(parts, kept, strict=True):
            part.part.values.copy_(values)
