"""A schedule that is not the checkpoint's: what to give, in the units of the command line."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.config.run_config import RunConfig
from megatron.core.config_base import config_from_dict
from megatron.core.errors import CheckpointError
from megatron.core.optimizer.optimizer_param_scheduler import ScheduleConfig, conflicting_fields
from megatron.training.model_setup import schedule_of

_FLAGS: Mapping[str, str] = {
    "max_lr": "--lr",
    "min_lr": "--min-lr",
    "decoupled_max_lr": "--decoupled-lr",
    "decoupled_min_lr": "--decoupled-min-lr",
    "init_lr": "--lr-warmup-init",
    "lr_decay_style": "--lr-decay-style",
    "lr_wsd_decay_style": "--lr-wsd-decay-style",
    "start_wd": "--start-weight-decay",
    "end_wd": "--end-weight-decay",
    "wd_incr_style": "--weight-decay-incr-style",
}
_LENGTHS: Mapping[str, str] = {
    "lr_warmup_steps": "--lr-warmup",
    "lr_decay_steps": "--lr-decay",
    "wsd_decay_steps": "--lr-wsd-decay",
    "wd_incr_steps": "--train",
}


@dataclass(frozen=True)
class _Conflict:
    """Hold a flag's value in the checkpoint and in this run; ``can_be_given`` where the former is one of the flag's."""

    flag: str
    stored: str
    given: str
    can_be_given: bool = True

    def __str__(self) -> str:
        return f"{self.flag} {self.stored} → {self.given}"


def check_schedule(state: Mapping[str, Any], config: RunConfig) -> None:
    """Refuse a scheduler's stored ``state`` where the run has another schedule and no flag says which one holds.

    Raises:
        CheckpointError: so it is; the message names the flags that would give the stored schedule.
    """
    if config.scheduler.override_opt_param_scheduler or config.scheduler.use_checkpoint_opt_param_scheduler:
        return
    stored, given = config_from_dict(ScheduleConfig, state["schedule"]), schedule_of(config)
    names = conflicting_fields(stored, given, int(state["num_samples"]))
    if not names:
        return
    conflicts = list(dict.fromkeys(_conflicts(names, stored, given, config)))
    remedy = ""
    if all(conflict.can_be_given for conflict in conflicts):
        remedy = f"{' '.join(f'{c.flag} {c.stored}' for c in conflicts)} to go on as it was, "
    raise CheckpointError(
        f"the schedule differs from the checkpoint's ({'; '.join(map(str, conflicts))}); give {remedy}"
        "--override-opt-param-scheduler to use the new one or --use-checkpoint-opt-param-scheduler to keep the old one"
        f"{_earlier_checkpoint(stored, given, int(state['num_samples']), config)}"
    )


def _earlier_checkpoint(stored: ScheduleConfig, given: ScheduleConfig, num_samples: int, config: RunConfig) -> str:
    """Say from which checkpoints the given schedule goes on by itself, where this one is already in the decay of WSD.

    A decay that is under way cannot begin again later without a leap of the learning rate.
    """
    if stored.lr_decay_style != "WSD" or stored.wsd_decay_steps is None:
        return ""
    start = stored.lr_decay_steps - stored.wsd_decay_steps
    if num_samples <= start or conflicting_fields(stored, given, start):
        return ""
    by_samples = bool(config.training.train_samples)
    place = f"{start} samples" if by_samples else f"{start / config.training.global_batch_size:.10g} iterations"
    return (
        f"; its WSD decay began after {place}: a checkpoint from before (--ckpt-step) goes on with the new one as it is"
    )


def _conflicts(
    names: Sequence[str], stored: ScheduleConfig, given: ScheduleConfig, config: RunConfig
) -> Iterator[_Conflict]:
    fraction = config.scheduler.lr_warmup_fraction
    for name in names:
        old, new = getattr(stored, name), getattr(given, name)
        if name == "lr_warmup_steps" and fraction is not None:
            old_fraction = old / stored.lr_decay_steps if stored.lr_decay_steps else 0.0
            if not math.isclose(old_fraction, fraction):
                yield _Conflict("--lr-warmup-fraction", str(old_fraction), str(fraction))
        elif name in _LENGTHS:
            yield _length_conflict(_LENGTHS[name], old, new, config)
        elif name in ("start_wd", "end_wd") and given.wd_incr_style == stored.wd_incr_style == "constant":
            yield _Conflict("--weight-decay", str(old), str(new))
        else:
            yield _Conflict(_FLAGS[name], str(old), str(new))


def _length_conflict(flag: str, old: float | None, new: float | None, config: RunConfig) -> _Conflict:
    """Return lengths of a schedule in iterations where the run has its own in them and both are whole ones."""
    batch, unit = config.training.global_batch_size, "iters"
    if config.training.train_samples:
        batch, unit = 1, "samples"
    # The length of the whole run is the user's to choose.
    can_be_given = old is not None and old % batch == 0 and flag != "--train"
    stored, given = ("none" if value is None else f"{value / batch:.10g}" for value in (old, new))
    return _Conflict(f"{flag}-{unit}", stored, given, can_be_given)
