"""The optimizer, its loss scaling and its clipping."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import BELOW_ONE, NOT_NEGATIVE, POSITIVE, Config, flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Config, role="run", in_args=True, retired=("use_distributed_optimizer",)):
    """Hold what the optimizer is built from; ``params_dtype`` is the model's, by name."""

    optimizer: str = flag(
        "adam", choices=("adam", "sgd"), not_built=("hybridadam", "cpu_adam", "muon", "dist_muon", "lion")
    )
    """Optimizer."""
    lr: float = flag(0.0, bounds=NOT_NEGATIVE)
    """Highest learning rate."""
    min_lr: float = flag(0.0, bounds=NOT_NEGATIVE)
    """Lowest learning rate after the warm-up."""
    weight_decay: float = flag(0.01, bounds=NOT_NEGATIVE)
    """Weight decay of the parameters with two or more dimensions."""
    clip_grad: float = flag(1.0, bounds=NOT_NEGATIVE)
    """Largest global gradient norm; 0 turns clipping off."""
    adam_beta1: float = flag(0.9, bounds=BELOW_ONE)
    """Decay of Adam's first moment."""
    adam_beta2: float = flag(0.999, bounds=BELOW_ONE)
    """Decay of Adam's second moment."""
    adam_eps: float = flag(1e-8, bounds=POSITIVE)
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = flag(0.9, bounds=NOT_NEGATIVE)
    """Momentum of SGD."""
    log_num_zeros_in_grad: bool = flag(False, in_args=False)
    """Count the zeros in the gradients and log the number."""
    loss_scale: float | None = flag(None, bounds=POSITIVE)
    """Constant loss scale for float16; without it the scale is dynamic."""
    initial_loss_scale: float = flag(2.0**32, bounds=POSITIVE)
    """First value of the dynamic loss scale."""
    min_loss_scale: float = flag(1.0, bounds=POSITIVE)
    """Lowest value of the dynamic loss scale."""
    loss_scale_window: int = flag(1000, bounds=POSITIVE)
    """Iterations without overflow after which the dynamic loss scale is doubled."""
    hysteresis: int = flag(2, bounds=POSITIVE)
    """Overflows after which the dynamic loss scale is halved."""
    params_dtype: str = flag("float32", cli=False, in_args=False)
    """Type of the model's parameters: float32, bfloat16, float16 or float64 (follows the model)."""
