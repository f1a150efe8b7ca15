"""The optimizer, its loss scaling and its clipping."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Hold what the optimizer is built from; ``params_dtype`` is the model's, by name."""

    optimizer: str = flag("adam", choices=("adam", "sgd"))
    """Optimizer."""
    lr: float = 0.0
    """Highest learning rate."""
    min_lr: float = 0.0
    """Lowest learning rate after the warm-up."""
    weight_decay: float = 0.01
    """Weight decay of the parameters with two or more dimensions."""
    clip_grad: float = 1.0
    """Largest global gradient norm; 0 turns clipping off."""
    adam_beta1: float = 0.9
    """Decay of Adam's first moment."""
    adam_beta2: float = 0.999
    """Decay of Adam's second moment."""
    adam_eps: float = 1e-8
    """Added to the root of Adam's second moment."""
    sgd_momentum: float = 0.9
    """Momentum of SGD."""
    log_num_zeros_in_grad: bool = False
    """Count the zeros in the gradients and log the number."""
    loss_scale: float | None = None
    """Constant loss scale for float16; without it the scale is dynamic."""
    initial_loss_scale: float = 2.0**32
    """First value of the dynamic loss scale."""
    min_loss_scale: float = 1.0
    """Lowest value of the dynamic loss scale."""
    loss_scale_window: int = 1000
    """Iterations without overflow after which the dynamic loss scale is doubled."""
    hysteresis: int = 2
    """Overflows after which the dynamic loss scale is halved."""
    use_distributed_optimizer: bool = flag(False, cli=False)
    """Cut the optimizer's state over the data-parallel ranks (follows the data-parallel configuration)."""
    params_dtype: str = flag("float32", cli=False)
    """Type of the model's parameters: float32, bfloat16, float16 or float64 (follows the model)."""
