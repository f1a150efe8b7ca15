"""What losses and gradient norms are compared with: those before."""

from __future__ import annotations

import math
import statistics
from collections import deque

from megatron.training.faults.fault_config import FaultConfig

_NUM_LARGEST = 100
_TIMES_LARGEST = 10.0
_LEAST_LOSS_SPREAD = 0.01
"""The smallest standard deviation of losses, as a share of their mean: few steps may by chance be closer."""
_LEAST_NORM_SPREAD = 0.05
"""The smallest standard deviation of the logarithm of gradient norms."""


class ResultWatch:
    """Remember the losses and gradient norms of a run's accepted steps, and say which are too large to follow them.

    A loss is a spike where it is more standard deviations above the mean of the window than the threshold; of a
    gradient norm the logarithm is. Megatron's checks know the largest of the first hundred steps that they saw.
    """

    def __init__(self, config: FaultConfig) -> None:
        self._config = config
        self._losses: deque[float] = deque(maxlen=config.spike_window)
        self._norms: deque[float] = deque(maxlen=config.spike_window)
        self.num_seen = 0
        """How many steps were accepted."""
        self._largest_loss = 0.0
        self._largest_norm = 0.0

    @property
    def limits(self) -> tuple[float, float] | None:
        """Return the largest loss and gradient norm that are no spike; None where nothing is looked for."""
        config = self._config
        if not config.watches:
            return None
        loss = norm = math.inf
        if config.spike_policy is not None and 2 * len(self._losses) >= config.spike_window:
            least = _LEAST_LOSS_SPREAD * abs(statistics.fmean(self._losses))
            loss = _limit(self._losses, config.spike_threshold, least)
            norm = math.exp(min(_limit(self._norms, config.spike_threshold, _LEAST_NORM_SPREAD), 700.0))
        if self.num_seen >= _NUM_LARGEST:
            if config.check_for_spiky_loss:
                loss = min(loss, _TIMES_LARGEST * self._largest_loss)
            if config.check_for_large_grads:
                norm = min(norm, _TIMES_LARGEST * self._largest_norm)
        return loss, norm

    def add(self, loss: float, norm: float) -> None:
        """Remember an accepted step; figures that are not finite say nothing of those that follow."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return
        self._losses.append(loss)
        self._norms.append(math.log(max(norm, 1.0e-30)))
        if self.num_seen < _NUM_LARGEST:
            self._largest_loss = max(self._largest_loss, loss)
            self._largest_norm = max(self._largest_norm, norm)
        self.num_seen += 1

    def describe(self, loss: float, norm: float) -> str:
        """Return what speaks against a step, in words; empty where nothing does."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"the loss is {loss:g} and the gradient norm {norm:g}"
        largest_loss, largest_norm = self.limits or (math.inf, math.inf)
        found = []
        if loss > largest_loss:
            found.append(f"the loss {loss:.6g} is a spike: up to {largest_loss:.6g} would follow those before")
        if norm > largest_norm:
            found.append(f"the gradient norm {norm:.6g} is a spike: up to {largest_norm:.6g} would follow those before")
        return "; ".join(found)


def _limit(values: deque[float], threshold: float, least_spread: float) -> float:
    mean = statistics.fmean(values)
    spread = math.hypot(*(value - mean for value in values)) / math.sqrt(len(values))
    return mean + threshold * max(spread, least_spread)
