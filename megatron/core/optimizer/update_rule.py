"""An update rule examined by trial steps: whether it is elementwise, and which state no checkpoint would hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from megatron.core.errors import ConfigurationError
from megatron.core.optimizer.inner_optimizer import BUILT_IN, STEP, InnerOptimizer, is_saved
from megatron.core.optimizer.optimizer_config import OptimizerConfig

_ROWS, _COLUMNS, _CUT = 3, 4, 5
_NUM_STEPS = 3
_GRADIENT_SCALES = (1.0, 1e3, 1e-3)
"""Small and large gradients: a rule with a threshold on the norm of a tensor may be elementwise on one side of it."""
_TOLERANCE = 1e-9
_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (((12,),), ((_CUT,), (12 - _CUT,)), ((_ROWS, _COLUMNS),))


@dataclass(frozen=True)
class UpdateRule:
    """Properties of an update rule.

    ``is_elementwise``: an element's update depends on no other element, so that a shard is updated as the whole is.
    ``unsaved`` names the state that no checkpoint would hold, each with its place. Both are found by trial steps, which
    cannot show a dependence that begins beyond the sizes of their gradients.
    """

    name: str
    is_elementwise: bool = True
    unsaved: tuple[str, ...] = ()


@torch.no_grad()
def examine_rule(config: OptimizerConfig) -> UpdateRule:
    """Probe the configuration's update rule by three trial steps on twelve float64 numbers on the CPU.

    The rule is elementwise if it gives the same result for the numbers as one vector, as two and as a matrix, whether
    gradients are small or large.

    Raises:
        ConfigurationError: the rule does not make a step.
    """
    if config.elementwise in BUILT_IN:
        return UpdateRule(config.elementwise)
    is_elementwise, unsaved = True, list[str]()
    for scale in _GRADIENT_SCALES:
        flat, cut, matrix = (_Trial(config, shapes, scale) for shapes in _SHAPES)
        is_elementwise = is_elementwise and flat.agrees_with(cut) and flat.agrees_with(matrix)
        unsaved += flat.unsaved if is_elementwise else matrix.unsaved
    return UpdateRule(flat.name, is_elementwise, tuple(dict.fromkeys(unsaved)))


class _Trial:
    """Let a rule update parameters of some shapes, which hold the same twelve numbers whatever the shapes are."""

    def __init__(self, config: OptimizerConfig, shapes: Sequence[tuple[int, ...]], gradient_scale: float) -> None:
        self._shapes = tuple(shapes)
        generator = torch.Generator().manual_seed(1)
        values, *gradients = torch.randn(1 + _NUM_STEPS, 12, generator=generator, dtype=torch.float64)
        self._parameters = [p.clone() for p in self._cut(values)]
        whole = {id(p): torch.Size(shape) for p, shape in zip(self._parameters, self._shapes, strict=True)}
        self.name = config.elementwise
        try:
            inner = InnerOptimizer(config, [(self._parameters, 1.0)], shapes=whole)
            self._optimizer = inner.rule
            self.name = type(self._optimizer).__name__
            before, after_one = dict(_places(self._optimizer)), set[str]()
            for number, gradient in enumerate(gradients):
                inner.set_learning_rate(0.01 / (1 + number), 0.1)
                for parameter, own in zip(self._parameters, self._cut(gradient), strict=True):
                    parameter.grad = own * gradient_scale
                inner.step(self._parameters, 0.5)
                after_one = after_one or set(self.state)
        except Exception as error:
            raise ConfigurationError(
                f"--optimizer {config.elementwise}: {self.name} fails in a trial step on a float64 CPU tensor of shape "
                f"{list(self._shapes[0])} ({type(error).__name__}: {error}); it must take such tensors, need no "
                "closure, and create its state in its own first step or name all of it in _state_names"
            ) from error
        self.unsaved = tuple(self._find_unsaved(before, after_one))

    @property
    def state(self) -> dict[str, Any]:
        """Return the first parameter's state."""
        return next(iter(self._optimizer.state.values()), {})

    def agrees_with(self, other: _Trial) -> bool:
        """Return whether both have the same parameters, numbers and tensors at the end."""
        if not _is_close(_joined(self._parameters), _joined(other._parameters)):
            return False
        states = [list(trial._optimizer.state.values()) for trial in (self, other)]
        names = {frozenset(state) for of_trial in states for state in of_trial}
        return len(names) <= 1 and all(self._is_alike(states, name) for name in self.state)

    def _is_alike(self, states: Sequence[Sequence[dict[str, Any]]], name: str) -> bool:
        """Return whether one kind of state is each element's own, or one value for all."""
        mine, others = ([state[name] for state in of_trial] for of_trial in states)
        if not all(is_saved(value) for value in (*mine, *others)):
            return True
        tensors = [torch.as_tensor(value, dtype=torch.float64) for value in (*mine, *others)]
        if tensors[0].numel() == 12:
            others_joined = _joined(tensors[1:])
            return others_joined.numel() == 12 and _is_close(tensors[0], others_joined)
        return all(tensor.numel() == 1 and _is_close(tensor, tensors[0]) for tensor in tensors)

    def _find_unsaved(self, before: dict[str, Any], after_one: set[str]) -> Iterator[str]:
        for place, value in _places(self._optimizer):
            if place not in before or before[place] != value:
                yield place
        keys: list[Any] = list(self._optimizer.state)
        for key in keys:
            if not isinstance(key, torch.Tensor):
                yield f"state[{key!r}]"
        for name, value in self.state.items():
            if name == STEP and float(value) != _NUM_STEPS:
                yield "step (which does not count updates)"
            elif not is_saved(value) and value is not None:
                yield f"{name} ({type(value).__name__})"
            elif name not in after_one:
                yield f"{name} (which does not exist after the first update)"

    def _cut(self, values: torch.Tensor) -> list[torch.Tensor]:
        sizes = [torch.Size(shape).numel() for shape in self._shapes]
        return list(values.split_with_sizes(sizes))


def _places(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """Yield the numbers that a rule keeps outside its parameters' state, but for the rates that the schedule sets."""
    places = [(f"param_groups[{number}]", group) for number, group in enumerate(optimizer.param_groups)]
    for place, values in (*places, ("the optimizer", vars(optimizer))):
        for name, value in values.items():
            if is_saved(value) and name not in ("lr", "weight_decay", "grad_scale"):
                yield f"{name} of {place}", value.tolist() if isinstance(value, torch.Tensor) else value


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _is_close(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first.reshape(-1), second.reshape(-1), rtol=_TOLERANCE, atol=_TOLERANCE)
