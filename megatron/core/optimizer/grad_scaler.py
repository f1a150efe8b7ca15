"""The factor on the loss that keeps half-precision gradients from vanishing.

Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

from typing import Any, Protocol

from megatron.core.errors import CheckpointError
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class GradScaler(Protocol):
    """Hold a loss scale and adapt it to whether an iteration's gradients were finite."""

    @property
    def scale(self) -> float:
        """Return the factor on the loss of the next iteration."""

    def update(self, found_inf: bool) -> None:
        """Take note of one iteration."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs, as JSON-ready values."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set what ``state_dict`` returned."""


class ConstantGradScaler:
    """Keep one scale for ever."""

    def __init__(self, scale: float = 1.0) -> None:
        self._scale = scale

    @property
    def scale(self) -> float:
        """Return the scale."""
        return self._scale

    def update(self, found_inf: bool) -> None:
        """Do nothing: the scale is constant."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing: the scale comes from the configuration."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Do nothing: the scale comes from the configuration."""


class DynamicGradScaler:
    """Halve the scale at repeated overflows and double it after a long time without any.

    ``hysteresis`` overflows since the last doubling are needed before the first halving; from then on each overflow
    halves. ``growth_interval`` finite iterations in a row double the scale and restore the hysteresis.
    """

    growth_factor = 2.0
    backoff_factor = 0.5

    def __init__(self, initial_scale: float, min_scale: float, growth_interval: int, hysteresis: int) -> None:
        self._scale = initial_scale
        self.min_scale = min_scale
        self.growth_interval = growth_interval
        self.hysteresis = hysteresis
        self._growth_tracker = 0
        self._hysteresis_tracker = hysteresis

    @property
    def scale(self) -> float:
        """Return the current scale."""
        return self._scale

    def update(self, found_inf: bool) -> None:
        """Take note of one iteration."""
        if found_inf:
            self._growth_tracker = 0
            self._hysteresis_tracker -= 1
            if self._hysteresis_tracker <= 0:
                self._scale = max(self._scale * self.backoff_factor, self.min_scale)
            return
        self._growth_tracker += 1
        if self._growth_tracker == self.growth_interval:
            self._growth_tracker = 0
            self._hysteresis_tracker = self.hysteresis
            self._scale *= self.growth_factor

    def state_dict(self) -> dict[str, Any]:
        """Return the scale and both counters."""
        return {
            "scale": self._scale,
            "growth_tracker": self._growth_tracker,
            "hysteresis_tracker": self._hysteresis_tracker,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the scale and both counters.

        Raises:
            CheckpointError: the state is not that of a dynamic loss scale.
        """
        if not state:
            raise CheckpointError(
                "the checkpoint holds no dynamic loss scale: it was saved with a constant one or without float16; "
                "give --loss-scale, or --no-load-optim to begin with --initial-loss-scale"
            )
        self._scale = float(state["scale"])
        self._growth_tracker = int(state["growth_tracker"])
        self._hysteresis_tracker = int(state["hysteresis_tracker"])


def make_grad_scaler(config: OptimizerConfig) -> GradScaler:
    """Return the scaler of a run: constant where a loss scale is given or nothing is float16, else dynamic."""
    if config.loss_scale is not None:
        return ConstantGradScaler(config.loss_scale)
    if config.params_dtype != "float16":
        return ConstantGradScaler()
    return DynamicGradScaler(
        config.initial_loss_scale, config.min_loss_scale, config.loss_scale_window, config.hysteresis
    )
