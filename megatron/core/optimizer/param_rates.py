"""Learning rate and weight decay per parameter: multipliers of the scheduled values."""

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
    """Learning rate of a parameter: the decoupled (--decoupled-lr) or the common one, and a multiplier.

    ``kind`` is the kind of parameter for clipping, if gradients are clipped per kind.
    """

    is_decoupled: bool = False
    multiplier: float = 1.0
    kind: str = ALL_KINDS


COMMON_RATE = Rate()


class ParamRates:
    """Multipliers of each parameter's learning rate and weight decay.

    The first entry of ``param_group_overrides`` that matches a parameter's name and has the multiplier applies.
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
        """Return the muP multiplier of the learning rate: base width / width for elementwise updates."""
        if spec.width_multiplier == 1.0:
            return 1.0
        if self._config.optimizer == "muon" and is_orthogonalized(spec):
            # The other scale modes keep the size of outputs independent of the width.
            return spec.width_multiplier**-0.5 if self._config.muon_scale_mode == "spectral" else 1.0
        return 1.0 / spec.width_multiplier

    def weight_decay(self, parameter: torch.nn.Parameter) -> float:
        """Return the weight-decay multiplier of a parameter, by default 1, or 0 for parameters without weight decay."""
        name = spec_of(parameter).name
        given = (o.wd_mult for o in self._overrides if o.wd_mult is not None and o.matches(name))
        return next(given, 1.0 if is_decayed(name, parameter) else 0.0)

    def check_patterns(self, parameters: Iterable[torch.nn.Parameter], world: Group) -> None:
        """Check that every pattern matches a trained parameter of some rank; collective.

        Raises:
            ConfigurationError: a pattern matches none. All ranks raise.
        """
        if not self._overrides:
            return
        names = {spec_of(parameter).name for parameter in parameters}
        unmatched = [o for o in self._overrides if not any_rank(any(o.matches(name) for name in names), world)]
        if not unmatched:
            return
        all_names = sorted(set[str]().union(*all_gather_objects(names, world)))
        problems = [
            f"--param-group-overrides {o.pattern}: no trained parameter matches; parameters are "
            f"{', '.join(all_names[:_NUM_NAMED])} and {max(0, len(all_names) - _NUM_NAMED)} more"
            for o in unmatched
        ]
        raise ConfigurationError(problems)

    def by_rate(self, parameters: Sequence[torch.nn.Parameter]) -> list[tuple[Rate, list[torch.nn.Parameter]]]:
        """Group parameters by learning rate, in the given order within each group."""
        found: dict[Rate, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            found.setdefault(self.learning_rate(parameter), []).append(parameter)
        return sorted(found.items(), key=lambda item: item[0])

    def by_decay(self, parameters: Sequence[torch.nn.Parameter]) -> list[tuple[float, list[torch.nn.Parameter]]]:
        """Group parameters by weight decay, largest multiplier first."""
        found: dict[float, list[torch.nn.Parameter]] = {}
        for parameter in parameters:
            found.setdefault(self.weight_decay(parameter), []).append(parameter)
        return sorted(found.items(), key=lambda item: -item[0])
