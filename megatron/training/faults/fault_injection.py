"""Faults made on purpose: the results of a rank are spoilt as a broken device would, to see what is made of it."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from megatron.core.layer_output import LayerOutput
from megatron.core.pipeline_parallel.executor import ChunkResult, MicrobatchLoss
from megatron.training.faults.fault_config import FaultConfig


class FaultInjection:
    """Spoil what the model chunks of one rank make, in iterations and on a rank that the seed decides.

    Every rank knows when and where; nothing that examines a step asks.
    """

    def __init__(self, config: FaultConfig, seed: int, rank: int, world_size: int) -> None:
        self._config = config
        self._seed = seed
        self._rank = rank
        self._world_size = world_size
        self._is_due = False
        self._is_broken = False

    def begin(self, iteration: int) -> None:
        """Draw whether something happens in an iteration."""
        rate = self._config.error_injection_rate
        self._is_due = rate > 0 and _draw(self._seed, iteration, "when") % rate == 0

    def end(self) -> None:
        """End the first computation of a step: a transient fault does not come again."""
        self._is_due = False

    @property
    def suspects_a_right_result(self) -> bool:
        """Return whether a right result is to be suspected in this iteration."""
        return self._is_due and self._config.error_injection_type == "correct_result"

    def is_here(self, iteration: int) -> bool:
        """Return whether something happens on this rank in an iteration that has begun."""
        return self._is_due and _draw(self._seed, iteration, "where") % self._world_size == self._rank

    def spoil(self, result: ChunkResult, iteration: int) -> ChunkResult:
        """Return a chunk's result, not a number where this rank's device is to fail."""
        kind = self._config.error_injection_type
        is_here = self.is_here(iteration)
        if is_here and kind == "persistent_error":
            self._is_broken = True
        if not (self._is_broken or (is_here and kind == "transient_error")):
            return result
        if isinstance(result, MicrobatchLoss):
            return replace(result, loss_sum=result.loss_sum * float("nan"))
        if isinstance(result, LayerOutput):
            return result._replace(hidden=result.hidden * float("nan"))
        return result * float("nan")


def _draw(seed: int, iteration: int, purpose: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{iteration}/{purpose}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
