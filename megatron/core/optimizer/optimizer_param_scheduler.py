"""Learning-rate and weight-decay schedules, as functions of the number of samples in successful iterations."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any, Protocol

from megatron.core.config_base import config_from_dict, config_to_dict
from megatron.core.errors import CheckpointError, ConfigurationError
from megatron.core.registry import find_registered

DECAYS: Mapping[str, Callable[[float], float]] = MappingProxyType(
    {
        "linear": lambda ratio: 1.0 - ratio,
        "cosine": lambda ratio: 0.5 * (math.cos(math.pi * ratio) + 1.0),
        "exponential": lambda ratio: 2.0 * math.pow(0.5, ratio) - 1.0,
        "minus_sqrt": lambda ratio: 1.0 - math.sqrt(ratio),
    }
)
"""Decay styles by name: the remaining fraction of a decay, as a function of the elapsed fraction of its length."""
_STYLES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "lr_decay_style": ("constant", "inverse-square-root", "WSD", *DECAYS),
        "lr_wsd_decay_style": tuple(DECAYS),
    }
)
SCHEDULES = "learning-rate schedule"
"""Kind under which scripts register decay styles like those of `DECAYS`."""
_WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")
_IN_MEGATRON: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "lr_decay_style": ("constant", "linear", "cosine", "inverse-square-root", "WSD"),
        "lr_wsd_decay_style": ("exponential", "linear", "cosine", "minus_sqrt"),
    }
)


def styles_unknown_to_megatron(styles: Mapping[str, Any]) -> list[str]:
    """Return the flags of a schedule's styles that Megatron-LM does not have, so that its files cannot record them."""
    return [
        f"--{name.replace('_', '-')} {styles[name]}"
        for name, known in _IN_MEGATRON.items()
        if styles.get(name) not in (None, *known)
    ]


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig:
    """Learning-rate and weight-decay schedules; every length is in samples.

    ``lr_decay_style``: constant, linear, cosine, inverse-square-root or WSD (warmup-stable-decay: the last
    ``wsd_decay_steps`` decay with ``lr_wsd_decay_style``: exponential, linear, cosine or minus_sqrt).
    ``wd_incr_style``: constant, linear or cosine. With ``decoupled_max_lr`` the word embedding and the output layer
    have a separate learning rate, of the same shape between it and ``decoupled_min_lr`` (by default ``min_lr``).
    """

    max_lr: float
    min_lr: float = 0.0
    init_lr: float = 0.0
    lr_warmup_steps: float = 0
    lr_decay_steps: int = 0
    lr_decay_style: str = "linear"
    wsd_decay_steps: int | None = None
    lr_wsd_decay_style: str = "exponential"
    start_wd: float = 0.01
    end_wd: float = 0.01
    wd_incr_steps: int = 0
    wd_incr_style: str = "constant"
    decoupled_max_lr: float | None = None
    decoupled_min_lr: float | None = None

    def __post_init__(self) -> None:
        """Reject schedules that are incomplete or inconsistent."""
        if self.wd_incr_style not in _WEIGHT_DECAY_STYLES:
            raise ConfigurationError(
                f"--weight-decay-incr-style {self.wd_incr_style} is unknown; possible values: "
                f"{', '.join(_WEIGHT_DECAY_STYLES)}"
            )
        if self.lr_decay_style == "WSD" and self.wsd_decay_steps is None:
            raise ConfigurationError(
                "--lr-decay-style WSD needs the length of its decay; pass --lr-wsd-decay-iters or "
                "--lr-wsd-decay-samples"
            )
        if self.wd_incr_style == "constant" and self.start_wd != self.end_wd:
            raise ConfigurationError(
                f"--start-weight-decay {self.start_wd} and --end-weight-decay {self.end_wd} differ, but "
                "--weight-decay-incr-style is constant; use linear or cosine, or equal values"
            )

    def check_registered(self) -> None:
        """Check that the decay styles are built in or registered.

        A stored schedule that the run does not use may have the style of another script.

        Raises:
            ConfigurationError: one of them is not.
        """
        for name, built_in in _STYLES.items():
            if getattr(self, name) not in built_in:
                find_registered(SCHEDULES, getattr(self, name))


def learning_rate(config: ScheduleConfig, num_samples: int) -> float:
    """Return the learning rate of the iteration that follows ``num_samples`` samples of successful iterations."""
    if config.lr_warmup_steps > 0 and num_samples <= config.lr_warmup_steps:
        return config.init_lr + (config.max_lr - config.init_lr) * num_samples / config.lr_warmup_steps
    if config.lr_decay_style == "constant":
        return config.max_lr
    decay_length = config.lr_decay_steps - config.lr_warmup_steps
    if num_samples > config.lr_decay_steps or decay_length <= 0:
        return config.min_lr
    if config.lr_decay_style == "inverse-square-root":
        factor = math.sqrt(max(config.lr_warmup_steps, 1)) / math.sqrt(max(num_samples, 1))
        return max(config.min_lr, config.max_lr * factor)
    if config.lr_decay_style == "WSD":
        assert config.wsd_decay_steps is not None
        decay_start = config.lr_decay_steps - config.wsd_decay_steps
        ratio = 0.0
        if num_samples > decay_start:
            ratio = (num_samples - decay_start) / config.wsd_decay_steps
        remaining = _remaining(config.lr_wsd_decay_style, ratio)
    else:
        remaining = _remaining(config.lr_decay_style, (num_samples - config.lr_warmup_steps) / decay_length)
    return config.min_lr + remaining * (config.max_lr - config.min_lr)


def _remaining(style: str, elapsed: float) -> float:
    """Return the remaining fraction of a decay, built in or registered, after an elapsed fraction of its length."""
    if style in DECAYS:
        return DECAYS[style](elapsed)
    remaining = float(find_registered(SCHEDULES, style).value(elapsed))
    if not math.isfinite(remaining):
        raise ConfigurationError(f"{SCHEDULES} {style}: its value at {elapsed} is {remaining}; return a finite number")
    return remaining


def decoupled_learning_rate(config: ScheduleConfig, num_samples: int) -> float | None:
    """Return the learning rate of the word embedding and the output layer, or None if it is not decoupled."""
    if config.decoupled_max_lr is None:
        return None
    min_lr = config.min_lr if config.decoupled_min_lr is None else config.decoupled_min_lr
    return learning_rate(replace(config, max_lr=config.decoupled_max_lr, min_lr=min_lr), num_samples)


def weight_decay(config: ScheduleConfig, num_samples: int) -> float:
    """Return the weight decay of the iteration that follows ``num_samples`` samples of successful iterations."""
    if config.wd_incr_style == "constant" or num_samples > config.wd_incr_steps or config.wd_incr_steps == 0:
        return config.end_wd
    ratio = num_samples / config.wd_incr_steps
    if config.wd_incr_style == "cosine":
        ratio = 0.5 * (math.cos(math.pi * (1.0 - ratio)) + 1.0)
    else:
        assert config.wd_incr_style == "linear", config.wd_incr_style
    return config.start_wd + ratio * (config.end_wd - config.start_wd)


class HasLearningRate(Protocol):
    """Interface that accepts a learning rate and a weight decay, as the optimizer does."""

    def set_learning_rate(
        self, learning_rate: float, weight_decay: float, decoupled_learning_rate: float | None = None
    ) -> None:
        """Set the next step's values; ``decoupled_learning_rate`` is for the word embedding and the output layer."""


class OptimizerParamScheduler:
    """Schedule of an optimizer's learning rate and weight decay.

    ``num_samples`` counts the samples of successful iterations. The optimizer always has the values of the next
    iteration.
    """

    def __init__(self, optimizer: HasLearningRate, config: ScheduleConfig) -> None:
        config.check_registered()
        self._optimizer = optimizer
        self.config = config
        self.num_samples = 0
        self._apply()

    @property
    def learning_rate(self) -> float:
        return learning_rate(self.config, self.num_samples)

    @property
    def decoupled_learning_rate(self) -> float | None:
        """Return the next learning rate of the word embedding and the output layer, or None if it is not decoupled."""
        return decoupled_learning_rate(self.config, self.num_samples)

    def step(self, num_samples: int) -> None:
        """Advance by the samples of one successful iteration."""
        self.num_samples += num_samples
        self._apply()

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the learning-rate schedule and the schedule itself as JSON-ready values."""
        return {"num_samples": self.num_samples, "schedule": config_to_dict(self.config)}

    def load_state_dict(
        self, state: Mapping[str, Any], *, override: bool = False, use_checkpoint: bool = False
    ) -> tuple[str, ...]:
        """Restore the state that ``state_dict`` returned; return one line per value that replaces another.

        Raises:
            CheckpointError: the schedules differ and no option selects one of them.
            ConfigurationError: the selected schedule is not registered.
        """
        stored = config_from_dict(ScheduleConfig, state["schedule"])
        num_samples = int(state["num_samples"])
        chosen, lines = reconcile_schedules(
            stored, self.config, num_samples, override=override, use_checkpoint=use_checkpoint
        )
        chosen.check_registered()
        self.config = chosen
        self.num_samples = num_samples
        self._apply()
        return lines

    def _apply(self) -> None:
        decay = weight_decay(self.config, self.num_samples)
        self._optimizer.set_learning_rate(self.learning_rate, decay, self.decoupled_learning_rate)


def reconcile_schedules(
    stored: ScheduleConfig, given: ScheduleConfig, num_samples: int, *, override: bool, use_checkpoint: bool
) -> tuple[ScheduleConfig, tuple[str, ...]]:
    """Return the schedule of a run resumed at ``num_samples``, and one ``old → new`` line per difference.

    The decay length of a constant learning rate, and likewise of a constant weight decay, is not compared: it follows
    from the length of the run, which may grow on resume. Fields that `conflicting_fields` omits take the given value.

    ``override`` (``--override-opt-param-scheduler``) selects the given schedule, and its lines go from the stored value
    to the given value. ``use_checkpoint`` (``--use-checkpoint-opt-param-scheduler``) selects the stored schedule, and
    its lines go in the other direction.

    Raises:
        CheckpointError: the schedules differ and no option selects one of them.
        ConfigurationError: both options are set.
    """
    if override and use_checkpoint:
        raise ConfigurationError(
            "--override-opt-param-scheduler and --use-checkpoint-opt-param-scheduler exclude each other; omit one of "
            "them"
        )
    old, new = (given, stored) if use_checkpoint else (stored, given)
    lines = {name: f"{name}: {getattr(old, name)} → {getattr(new, name)}" for name in _differing_fields(stored, given)}
    conflicts = conflicting_fields(stored, given, num_samples)
    if conflicts and not override and not use_checkpoint:
        raise CheckpointError(
            f"the schedule differs from the checkpoint's ({'; '.join(lines[name] for name in conflicts)}); pass the "
            "recorded values, --override-opt-param-scheduler to use the new schedule, or "
            "--use-checkpoint-opt-param-scheduler to use the recorded schedule"
        )
    return new, tuple(lines.values())


def conflicting_fields(stored: ScheduleConfig, given: ScheduleConfig, num_samples: int) -> tuple[str, ...]:
    """Return the differing fields for which an option must select a schedule after ``num_samples`` samples.

    If the learning rate is in a flat phase of both schedules, constant or before the decay of WSD, the lengths of
    warmup and decay may differ.
    """
    differing = _differing_fields(stored, given)
    if stored.lr_decay_style == given.lr_decay_style and _stands_still(stored, given, num_samples):
        return tuple(name for name in differing if name not in ("lr_warmup_steps", "lr_decay_steps"))
    return differing


def _stands_still(stored: ScheduleConfig, given: ScheduleConfig, num_samples: int) -> bool:
    for config in (stored, given):
        if num_samples < config.lr_warmup_steps or config.lr_decay_style not in ("constant", "WSD"):
            return False
        if config.lr_decay_style == "WSD" and num_samples > config.lr_decay_steps - (config.wsd_decay_steps or 0):
            return False
    return True


def _differing_fields(stored: ScheduleConfig, given: ScheduleConfig) -> tuple[str, ...]:
    """Return the fields that differ, except for a length that has no effect in both schedules."""
    styles = {
        "wd_incr_steps": (stored.wd_incr_style, given.wd_incr_style),
        "lr_decay_steps": (stored.lr_decay_style, given.lr_decay_style),
    }
    return tuple(
        field.name
        for field in fields(ScheduleConfig)
        if getattr(stored, field.name) != getattr(given, field.name)
        and styles.get(field.name) != ("constant", "constant")
    )
