"""The lines by which a resumed run says which schedule it goes on with, in Megatron's words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.config_base import config_from_dict
from megatron.core.optimizer.optimizer_param_scheduler import ScheduleConfig, reconcile_schedules
from megatron.training.config.run_config import RunConfig
from megatron.training.model_setup import schedule_of

_NAMES: Mapping[str, str] = {
    "max_lr": "learning rate",
    "min_lr": "minimum learning rate",
    "lr_warmup_steps": "warmup iterations",
    "lr_decay_steps": "total number of iterations",
    "lr_decay_style": "learning rate decay style",
    "start_wd": "start weight decay",
    "end_wd": "end weight decay",
    "wd_incr_steps": "total number of weight decay iterations",
    "wd_incr_style": "weight decay incr style",
}
"""Megatron's names of a schedule's values, in its order; what it calls iterations are samples."""


def describe_schedule_values(state: Mapping[str, Any], config: RunConfig) -> str:
    """Return a line for each value of the schedule that goes on: the checkpoint's, or the run's in its place.

    ``state`` is what the checkpoint holds of the scheduler.

    Raises:
        CheckpointError: the schedules differ and no flag says which one holds.
    """
    flags = config.scheduler
    stored, is_override = config_from_dict(ScheduleConfig, state["schedule"]), flags.override_opt_param_scheduler
    chosen, _ = reconcile_schedules(
        stored,
        schedule_of(config),
        int(state["num_samples"]),
        override=is_override,
        use_checkpoint=flags.use_checkpoint_opt_param_scheduler,
    )
    lines = []
    for field, name in _NAMES.items():
        value = getattr(chosen, field)
        if is_override or value != getattr(stored, field):
            lines.append(f" > overriding {name} value to {value}")
        else:
            lines.append(f" > using checkpoint value {value} for {name}")
    return "\n".join(lines)
