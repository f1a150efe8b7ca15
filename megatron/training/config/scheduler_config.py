"""How learning rate and weight decay change over a run."""

from __future__ import annotations

import dataclasses

from megatron.core.config_base import flag


@dataclasses.dataclass(frozen=True, kw_only=True)
class SchedulerConfig:
    """Hold the schedule as it was given; `RunConfig.schedule_lengths` turns it into samples."""

    lr_decay_style: str = flag("linear", choices=("constant", "linear", "cosine", "inverse-square-root", "WSD"))
    """Shape of the learning rate after the warm-up."""
    lr_decay_iters: int | None = None
    """Iterations over which the learning rate falls; by default --train-iters."""
    lr_decay_samples: int | None = None
    """Samples over which the learning rate falls; by default --train-samples."""
    lr_wsd_decay_style: str = flag("exponential", choices=("exponential", "linear", "cosine", "minus_sqrt"))
    """Shape of the last part of the WSD schedule."""
    lr_wsd_decay_iters: int | None = None
    """Iterations of the last part of the WSD schedule."""
    lr_wsd_decay_samples: int | None = None
    """Samples of the last part of the WSD schedule."""
    lr_warmup_fraction: float | None = None
    """Share of the decay's length over which the learning rate rises."""
    lr_warmup_iters: int = 0
    """Iterations over which the learning rate rises."""
    lr_warmup_samples: int = 0
    """Samples over which the learning rate rises."""
    lr_warmup_init: float = 0.0
    """Learning rate at the start of the warm-up."""
    start_weight_decay: float | None = None
    """Weight decay at the start; by default --weight-decay."""
    end_weight_decay: float | None = None
    """Weight decay at the end; by default --weight-decay."""
    weight_decay_incr_style: str = flag("constant", choices=("constant", "linear", "cosine"))
    """Shape of the weight decay over the run."""
    override_opt_param_scheduler: bool = False
    """On resume, take the schedule from the command line where it differs from the checkpoint's."""
    use_checkpoint_opt_param_scheduler: bool = False
    """On resume, take the schedule from the checkpoint and ignore the command line's."""
