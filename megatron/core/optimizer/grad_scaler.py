"""Loss scaling: a factor on the loss that keeps float16 gradients from underflowing.

Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

from typing import Any, Protocol

from megatron.core.errors import CheckpointError
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class GradScaler(Protocol):
    """Interface of a loss scale that adapts to whether an iteration's gradients were finite."""

    @property
    def scale(self) -> float:
        """Return the loss scale of the next iteration."""

    @property
    def is_at_minimum(self) -> bool:
        """Return whether the scale is dynamic and cannot decrease further."""

    def update(self, found_inf: bool) -> None:
        """Update the scale after one iteration."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state for resuming, as JSON-ready values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state that ``state_dict`` returned."""


class ConstantGradScaler:
    """Constant loss scale."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def is_at_minimum(self) -> bool:
        """Return False: a constant scale never decreases."""
        return False

    def update(self, found_inf: bool) -> None:
        """Do nothing: the scale is constant."""

    def state_dict(self) -> dict[str, Any]:
        """Return an empty dictionary: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the scale comes from the configuration."""


class DynamicGradScaler:
    """Dynamic loss scale: halved after overflows, doubled after many finite iterations.

    The scale grows after ``growth_interval`` consecutive finite iterations. Overflows are counted from one growth to
    the next: those before the ``hysteresis``-th are tolerated; that one and every later one halve the scale.
    """

    def __init__(self, initial_scale: float, min_scale: float, growth_interval: int, hysteresis: int) -> None:
        self._scale = initial_scale
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._num_finite = 0
        self._num_overflows = 0

    @property
    def scale(self) -> float:
        return self._scale

    @property
    def is_at_minimum(self) -> bool:
        return self._scale <= self.min_scale

    def update(self, found_inf: bool) -> None:
        """Count one iteration, and change the scale when a counter reaches its limit."""
        self._num_overflows += found_inf
        self._num_finite = 0 if found_inf else self._num_finite + 1
        if found_inf and self._num_overflows >= self.hysteresis:
            self._scale = max(self.min_scale, self._scale / 2.0)
        elif self._num_finite == self.growth_interval:
            self._scale *= 2.0
            self._num_finite = self._num_overflows = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scale, the consecutive finite iterations, and the remaining hysteresis."""
        return {
            "scale": self._scale,
            "growth_tracker": self._num_finite,
            "hysteresis_tracker": self.hysteresis - self._num_overflows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the scale and both counters.

        Raises:
            CheckpointError: the state is not that of a dynamic loss scaler.
        """
        if not state:
            raise CheckpointError(
                "the checkpoint contains no dynamic loss scale: it was saved with a constant loss scale or without "
                "float16; pass --loss-scale, or --no-load-optim to start from --initial-loss-scale"
            )
        self._scale = float(state["scale"])
        self._num_finite = int(state["growth_tracker"])
        self._num_overflows = self.hysteresis - int(state["hysteresis_tracker"])


def make_grad_scaler(config: OptimizerConfig) -> GradScaler:
    """Create a run's scaler: constant if a loss scale is configured or the model is not float16, otherwise dynamic."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if config.params_dtype != "float16":
        return ConstantGradScaler()
    return DynamicGradScaler(
        config.initial_loss_scale, config.min_loss_scale, config.loss_scale_window, config.hysteresis
    )
