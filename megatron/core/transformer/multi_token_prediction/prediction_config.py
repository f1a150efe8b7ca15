"""How many tokens beyond the next a model predicts while it is trained."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import NOT_NEGATIVE, POSITIVE, Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class PredictionConfig(Config):
    """Hold the choices of multi-token prediction; without ``mtp_num_layers`` a model predicts the next token alone."""

    mtp_num_layers: int | None = flag(None, role="weights", bounds=POSITIVE, most=1000)
    """Number of layers behind the last one, each of which predicts one token further in training; by default none."""
    mtp_loss_scaling_factor: float = flag(0.1, role="recipe", bounds=NOT_NEGATIVE, needs="mtp_num_layers")
    """Weight of the mean loss of the layers of --mtp-num-layers beside the model's own loss."""

    @property
    def num_further_tokens(self) -> int:
        """Return how many tokens beyond the next are predicted."""
        return self.mtp_num_layers or 0


def further_loss_names(config: PredictionConfig) -> tuple[str, ...]:
    """Return what the losses of the further tokens are called in the log, the nearest token first."""
    return tuple(f"mtp_{depth + 1}_loss" for depth in range(config.num_further_tokens))
