"""Learning rate and weight decay per parameter: multipliers on the values of the schedule."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from megatron.core.collectives import all_gather_objects, any_rank
from megatron.core.errors import ConfigurationError
from megatron.core.optimizer.clip_grads import ALL_KINDS, kind_of
from megatron.core.optimizer.inner_optimizer import is_decayed, is_decoupled
from megatron.core.optimizer.muon import is_orthogonalized
from megatron.core.optimizer.optimizer_config import OptimizerConfig, parse_override
from megatron.core.process_group import Group
from megatron.core.sharding import ParamSpec, spec_of

_NUM_NAMED = 4


class Rate(NamedTuple):
    """Hold which learning rate a parameter has, that of --decoupled-lr or that of all, and its factor.

    Also the ``kind`` by which its gradient is clipped, where kinds are told apart.
    """

    is_decoupled: bool = False
    multiplier: float = 1.0
    kind: str = ALL_KINDS


COMMON_RATE = Rate()


class ParamRates:
    """Say what each parameter's learning rate and weight decay are multiplied by.

    The first of ``param_group_overrides`` whose pattern matches a parameter's name, and which has the multiplier,
    counts.
    """

    def __init__(self, config: OptimizerConfig) -> None:
        self._config = config
        self._has_decoupled = config.decoupled_lr is not None
        self._overrides = [parse_override(text) for text in config.param_group_overrides]

    def learning_rate(self, parameter: torch.nn.Parameter) -> Rate:
        """Return the learning rate of a parameter."""
        name = spec_of(parameter).name
        given = (o.lr_mult for o in self._overrides if o.lr_mult is not None and o.matches(name))
        multiplier = next(given, 1.0) * self._of_width(spec_of(parameter))
        kind = kind_of(spec_of(parameter)) if self._config.clips_by_kind else ALL_KINDS
        return Rate(self._has_decoupled and is_decoupled(name), multiplier, kind)

    def _of_width(self, spec: ParamSpec) -> float:
        """Return the factor of muP: as much narrower the base is, for what changes every element by as much."""
        if spec.width_multiplier == 1.0:
            return 1.0
        if self._config.optimizer == "muon" and is_orthogonalized(spec):
            # The other scales keep outputs as large at any width.
            return spec.width_multiplier**-0.5 if self._config.muon_scale_mode == "spectral" else 1.0
        return 1.0 / spec.width_multiplier

    def weight_decay(self, parameter: torch.nn.Parameter) -> float:
        """Return the multiplier of a parameter's weight decay, by default 1 or 0."""
        name = spec_of(parameter).name
        given = (o.wd_mult for o in self._overrides if o.wd_mult is not None and o.matches(name))
        return next(given, 1.0 if is_decayed(name, parameter) else 0.0)

    def check_patterns(self, parameters: Iterable[torch.nn.Parameter], world: Group) -> None:
        """Let every pattern match a trained parameter of some rank; collective.

        Raises:
            ConfigurationError: one matches none. All ranks raise.
        """
        if not self._overrides:
            return
        names = {spec_of(parameter).name for parameter in parameters}
        unmatched = [o for o in self._overrides if not any_rank(any(o.matches(name) for name in names), world)]
        if not unmatched:
            return
        all_names = sorted(set[str]().union(*all_gather_objects(names, world)))
        problems = [
            f"--param-group-overrides {o.pattern}: no trained parameter's name matches; there are "
            f"{', '.join(all_names[:_NUM_NAMED])} and {max(0, len(all_names) - _NUM_NAMED)} more"
            for o in unmatched
        ]
        raise ConfigurationError(problems)

    def by_rate(self, parameters: Sequence[torch.nn.Parameter]) -> list[tuple[Rate, list[torch.nn.Parameter]]]:
        """Return the parameters that share a learning rate together, each in the given order."""
        found: dict[Rate, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            found.setdefault(self.learning_rate(parameter), []).append(parameter)
        return sorted(found.items(), key=lambda item: item[0])

    def by_decay(self, parameters: Sequence[torch.nn.Parameter]) -> list[tuple[float, list[torch.nn.Parameter]]]:
        """Return the parameters that share a weight decay together, the most decayed first."""
        found: dict[float, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            found.setdefault(self.weight_decay(parameter), []).append(parameter)
        return sorted(found.items(), key=lambda item: -item[0])
