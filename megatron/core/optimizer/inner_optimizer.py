"""The inner optimizer: AdamW, SGD, Lion or apex's Adam, its parameter groups, and trial steps that check it.

AdamW: Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101. Lion takes the sign of a momentum: Chen et al.
2023, https://arxiv.org/abs/2302.06675. The trial steps determine whether an update rule is elementwise, and which of
its state a checkpoint would miss. apex is imported only on request.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch.optim.adamw import adamw

from megatron.core.errors import ConfigurationError
from megatron.core.optimizer.flat_state import FlatState
from megatron.core.optimizer.optimizer_config import OptimizerConfig, parse_optimizer_args
from megatron.core.registry import find_registered, is_registered

_PIECE = 1 << 24
"""Elements that are updated together; it bounds the size of temporary tensors."""


class FusedAdamW:
    """AdamW by torch's fused kernel, with the attributes of a torch optimizer that `InnerOptimizer` uses.

    The update is that of ``torch.optim.AdamW`` (Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101), on state
    that the caller creates. It is no ``torch.optim.Optimizer``, whose first use imports ``torch._dynamo``: that takes
    more than half a second of processor time.

    ``grad_scale`` divides the gradients, and with a ``found_inf`` of 1 nothing is updated, as in torch's fused
    optimizers.
    """

    grad_scale: torch.Tensor | None = None
    found_inf: torch.Tensor | None = None

    def __init__(
        self, groups: Iterable[Mapping[str, Any]], *, lr: float, betas: tuple[float, float], eps: float
    ) -> None:
        self.defaults: dict[str, Any] = {"lr": lr, "betas": betas, "eps": eps, "fused": True}
        self.param_groups: list[dict[str, Any]] = [{**self.defaults, **group} for group in groups]
        self.state: dict[torch.Tensor, dict[str, Any]] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update the parameters that have a gradient."""
        for group in self.param_groups:
            updated = [parameter for parameter in group["params"] if parameter.grad is not None]
            states = [self.state[parameter] for parameter in updated]
            beta1, beta2 = group["betas"]
            adamw(
                updated,
                [parameter.grad for parameter in updated],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                grad_scale=self.grad_scale,
                found_inf=self.found_inf,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )


class Lion(torch.optim.Optimizer):
    """Lion: subtract learning rate × (sign(``beta1`` · momentum + (1 - ``beta1``) · gradient) + decay · weight).

    The momentum, ``exp_avg`` in the state, then decays toward the gradient with ``beta2``.
    """

    def __init__(self, param_groups: list[dict[str, Any]], betas: tuple[float, float], lr: float = 0.0) -> None:
        super().__init__(param_groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; a closure is not supported."""
        assert closure is None
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            gradients = [parameter.grad for parameter in parameters]
            momenta = [self.state[parameter]["exp_avg"] for parameter in parameters]
            updates = torch._foreach_lerp(momenta, gradients, 1.0 - beta1)
            torch._foreach_sign_(updates)
            torch._foreach_mul_(parameters, 1.0 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, updates, alpha=-group["lr"])
            torch._foreach_lerp_(momenta, gradients, 1.0 - beta2)

    @torch.no_grad()
    def step_if(self, is_finite: torch.Tensor, grad_multiplier: torch.Tensor) -> None:
        """Update with the gradients times a factor if ``is_finite`` is true; otherwise change nothing.

        The device evaluates the condition, so the host reads neither argument. The gradients are not modified.

        Shapes: ``is_finite: []`` of bool, ``grad_multiplier: []`` float64.
        """
        factors: dict[torch.dtype, torch.Tensor] = {}
        for group in self.param_groups:
            for weights, gradients, momenta in self._chunks(group["params"]):
                dtype = weights[0].dtype
                if dtype not in factors:
                    factors[dtype] = grad_multiplier.to(dtype)
                _update_if(is_finite, group, weights, list(torch._foreach_mul(gradients, factors[dtype])), momenta)

    def _chunks(self, parameters: Sequence[torch.Tensor]) -> Iterator[list[list[torch.Tensor]]]:
        """Yield weights, gradients and momenta to update together, of one dtype; large tensors in flat pieces."""
        chunk: list[Sequence[torch.Tensor]] = []
        room = _PIECE
        for parameter in parameters:
            if parameter.grad is None:
                continue
            flat = (parameter, parameter.grad, self.state[parameter]["exp_avg"])
            is_small = parameter.numel() <= _PIECE
            for pieces in [flat] if is_small else zip(*(tensor.view(-1).split(_PIECE) for tensor in flat), strict=True):
                if chunk and (pieces[0].numel() > room or pieces[0].dtype is not chunk[0][0].dtype):
                    yield [list(tensors) for tensors in zip(*chunk, strict=True)]
                    chunk, room = [], _PIECE
                chunk.append(pieces)
                room -= pieces[0].numel()
        if chunk:
            yield [list(tensors) for tensors in zip(*chunk, strict=True)]


def _update_if(
    is_finite: torch.Tensor,
    group: dict[str, Any],
    weights: list[torch.Tensor],
    gradients: list[torch.Tensor],
    momenta: list[torch.Tensor],
) -> None:
    """Update some weights if ``is_finite`` is true; all temporary tensors are freed on return."""
    beta1, beta2 = group["betas"]
    updates = torch._foreach_lerp(momenta, gradients, 1.0 - beta1)
    torch._foreach_sign_(updates)
    moved = torch._foreach_mul(weights, 1.0 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(moved, updates, alpha=-group["lr"])
    del updates
    later = torch._foreach_lerp(momenta, gradients, 1.0 - beta2)
    for new, old in zip((*moved, *later), (*weights, *momenta), strict=True):
        torch.where(is_finite, new, old, out=old)


def load_fused_adam() -> type[torch.optim.Optimizer] | None:
    """Return apex's fused Adam, or None if apex is missing or broken (with a warning if broken)."""
    try:
        from apex.optimizers import FusedAdam
    except ModuleNotFoundError:
        return None
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        warnings.warn(f"apex is installed but unusable ({error}); torch's fused Adam is used", stacklevel=2)
        return None
    return cast("type[torch.optim.Optimizer]", FusedAdam)


BUILT_IN = ("adam", "sgd", "lion")
"""Update rules that are elementwise and create all their state initially."""
STEP = "step"
"""Number of updates in a rule's state; a checkpoint stores it once, for the whole optimizer."""


class InnerOptimizer:
    """Optimizer that updates main parameters from their ``grad``.

    ``state_names`` are the state tensors that exist initially, in a parameter's shape: Adam's moments, or a momentum.
    An update rule may create other state in its first update; `make_state` creates it earlier, so that it can be
    loaded. One step count is shared by all parameters. ``groups`` pairs main parameters with their weight-decay
    multiplier. ``fused_adam`` is apex's class, used instead of torch's if every main parameter is a float32 CUDA
    tensor. The rule updates a parameter as a flat tensor, or in the shape that ``shapes`` has for its id. With
    ``flat_state``, which holds the main parameters, one kernel makes Adam's update and rounds it into the model.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        groups: Sequence[tuple[Sequence[torch.Tensor], float]],
        fused_adam: type[torch.optim.Optimizer] | None = None,
        shapes: Mapping[int, torch.Size] | None = None,
        flat_state: FlatState | None = None,
    ) -> None:
        self._flat_state = flat_state
        flat = [parameter for group, _ in groups for parameter in group]
        self._updated = {id(p): p.view(shapes[id(p)]) if shapes and id(p) in shapes else p for p in flat}
        param_groups: list[dict[str, Any]] = [
            {"params": [self._updated[id(p)] for p in parameters], "weight_decay": 0.0} for parameters, _ in groups
        ]
        self._weight_decay_multipliers = [multiplier for _, multiplier in groups]
        parameters = [parameter for group, _ in groups for parameter in group]
        if not all(p.is_cuda and p.dtype is torch.float32 for p in parameters):
            fused_adam = None
        self._is_torch = fused_adam is None or config.elementwise != "adam"
        self._torch_optimizer = _make_torch_optimizer(config, param_groups, fused_adam)
        self.state_names = _state_names(config)
        # The fused kernels read the scale as float32, which would round a float64 run's gradients. A rule that does not
        # declare `grad_scale` ignores it, so its gradients are scaled before the update.
        is_fused = self._is_torch and bool(self._torch_optimizer.defaults.get("fused"))
        divides = is_fused or hasattr(type(self._torch_optimizer), "grad_scale")
        self._scales_in_kernel = divides and all(p.dtype is torch.float32 for p in parameters)
        # On CPU the host can read the flag without waiting, which saves the kernel a division and a store.
        is_fused = is_fused and self._scales_in_kernel
        can_decide = is_fused or isinstance(self._torch_optimizer, Lion)
        self.decides_on_device = flat_state is not None or (can_decide and all(p.is_cuda for p in parameters))
        self._is_adam = self._is_torch and config.elementwise == "adam"
        self._has_own_state = self._is_torch and config.elementwise not in BUILT_IN
        self._is_made = False
        self._fill_state()
        self._first_state: dict[torch.Tensor, dict[str, Any]] = {}
        # Tensors that `state_of` returned for numbers: `restore_numbers` reads the numbers back from them.
        self._lent: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    @property
    def rule(self) -> torch.optim.Optimizer | FusedAdamW:
        return self._torch_optimizer

    def set_learning_rate(self, learning_rate: float, weight_decay: float) -> None:
        """Set the values of the next step."""
        for group, multiplier in zip(self._torch_optimizer.param_groups, self._weight_decay_multipliers):
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay * multiplier
        if self._flat_state is not None:
            self._flat_state.write_rates(self._torch_optimizer.param_groups)

    @property
    def can_be_captured(self) -> bool:
        """Return whether a CUDA graph can make the update: it reads all its numbers from the device."""
        return self._flat_state is not None

    def keep_rates_on_device(self) -> None:
        """Prepare for updates by a CUDA graph, see `can_be_captured`."""
        assert self._flat_state is not None
        self._flat_state.keep_rates_on_device()
        self._flat_state.write_rates(self._torch_optimizer.param_groups)

    def step_if(
        self, is_finite: torch.Tensor, parameters: Sequence[torch.Tensor], grad_multiplier: torch.Tensor
    ) -> None:
        """Update if ``is_finite`` is true; otherwise change nothing.

        On CUDA fused kernels and Lion evaluate the condition on the device (``decides_on_device``), so that the host
        does not wait.

        Shapes: ``is_finite: []`` of bool, ``grad_multiplier: []`` float64.
        """
        if self._flat_state is not None:
            self._flat_state.step(is_finite, grad_multiplier, self._torch_optimizer.param_groups)
            return
        if not self.decides_on_device:
            if bool(is_finite):
                self.step(parameters, float(grad_multiplier))
            return
        if not parameters:
            return
        if isinstance(self._torch_optimizer, Lion):
            self._torch_optimizer.step_if(is_finite, grad_multiplier)
            return
        # torch's own GradScaler passes the divisor and the overflow flag to fused optimizers through these attributes.
        optimizer: Any = self._torch_optimizer
        optimizer.grad_scale = grad_multiplier.reciprocal().float()
        optimizer.found_inf = is_finite.logical_not().float()
        self._step_shaped(parameters)
        optimizer.grad_scale = optimizer.found_inf = None

    def step(self, parameters: Sequence[torch.Tensor], grad_multiplier: float) -> None:
        """Update every parameter with its gradient times ``grad_multiplier``, in the same kernel if possible.

        Afterwards the gradients may or may not be scaled. A rank whose shards are only padding has no parameters.
        """
        if not parameters:
            return
        optimizer: Any = self._torch_optimizer
        if grad_multiplier != 1.0 and not self._scales_in_kernel:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], grad_multiplier)
        elif grad_multiplier != 1.0:
            optimizer.grad_scale = torch.tensor(1.0 / grad_multiplier, dtype=torch.float32, device=parameters[0].device)
        self._step_shaped(parameters)
        if self._scales_in_kernel:
            optimizer.grad_scale = None

    def state_of(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return a state tensor of a main parameter, or a number as a tensor for `restore_numbers`."""
        state = self._torch_optimizer.state[self._updated[id(parameter)]]
        value = state[name]
        if isinstance(value, torch.Tensor):
            return value
        tensor = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
        self._lent.append((state, name, tensor))
        return tensor

    def names_of_state(self, parameter: torch.Tensor) -> list[str]:
        """Return the names of a main parameter's tensors and numbers in the state, without the number of updates."""
        updated = self._updated[id(parameter)]
        state = self._torch_optimizer.state.get(updated, {})
        return [name for name, value in state.items() if name != STEP and is_saved(value)]

    @torch.no_grad()
    def make_state(self) -> None:
        """Create the state that the rule creates in its first update, without changing any parameter.

        The values are to be overwritten by loading, or saved before the first update. `drop_made_state` removes them.
        """
        groups = self._torch_optimizer.param_groups
        updated = [p for group in groups for p in group["params"]]
        if self._is_made or not self._has_own_state or not updated:
            return
        self._first_state = {p: copy.deepcopy(dict(state)) for p, state in self._torch_optimizer.state.items()}
        settings = [dict(group) for group in groups]
        kept = [(p, p.clone(), p.grad) for p in updated]
        for group in groups:
            group["lr"] = group["weight_decay"] = 0.0
        for parameter in updated:
            parameter.grad = torch.zeros_like(parameter)
        self._torch_optimizer.step()
        for parameter, values, gradient in kept:
            parameter.copy_(values)
            parameter.grad = gradient
        for group, setting in zip(groups, settings, strict=True):
            group.update(setting)
        self._is_made = True

    def drop_made_state(self) -> None:
        """Return to the state before the first update, if `make_state` created state or an update was made."""
        if self._has_own_state and self._is_made:
            self._lent.clear()
            self._torch_optimizer.state.clear()
            self._fill_state()
            self._torch_optimizer.state.update(self._first_state)
            self._first_state = {}
            self._is_made = False

    def forget_lent_numbers(self) -> None:
        """Drop the tensors that `state_of` returned for numbers; they are not needed after saving."""
        self._lent.clear()

    def restore_numbers(self) -> None:
        """Copy loaded values back into the numbers of the state."""
        for state, name, tensor in self._lent:
            state[name] = tensor.item()
        self._lent.clear()

    def _fill_state(self) -> None:
        """Create the initial state."""
        for parameter in self._updated.values():
            if self._flat_state is not None:
                self._torch_optimizer.state[parameter] = {**self._flat_state.state_of(parameter)}
                continue
            state: dict[str, Any] = {name: torch.zeros_like(parameter) for name in self.state_names}
            if self._is_adam:
                state[STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if state:
                self._torch_optimizer.state[parameter] = state

    def _step_shaped(self, parameters: Sequence[torch.Tensor]) -> None:
        """Run the rule's step with gradients in the shapes in which it updates the parameters."""
        shaped = [(p, updated) for p in parameters if (updated := self._updated[id(p)]) is not p]
        for parameter, updated in shaped:
            updated.grad = None if parameter.grad is None else parameter.grad.view(updated.shape)
        self._torch_optimizer.step()
        self._is_made = True
        for _, updated in shaped:
            updated.grad = None

    @property
    def num_updates(self) -> torch.Tensor | int:
        """Return Adam's number of updates, as a tensor on its device; 0 for rules that do not count."""
        for state in self._torch_optimizer.state.values():
            if "step" in state:
                count: torch.Tensor = state["step"]
                return count
        return max((group.get("step", 0) for group in self._torch_optimizer.param_groups), default=0)

    def set_num_steps(self, num_steps: int) -> None:
        """Set the number of updates, which Adam uses for bias correction."""
        for state in self._torch_optimizer.state.values():
            if isinstance(state.get(STEP), torch.Tensor):
                state[STEP].fill_(num_steps)
            elif STEP in state:
                state[STEP] = num_steps
        if num_steps == 0:
            self.drop_made_state()
        if not self._is_torch:
            for group in self._torch_optimizer.param_groups:
                group["step"] = num_steps


def is_saved(value: Any) -> bool:
    """Return whether a checkpoint can store a value of a rule's state: a tensor or a number."""
    return isinstance(value, torch.Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _make_torch_optimizer(
    config: OptimizerConfig,
    param_groups: list[dict[str, Any]],
    fused_adam: type[torch.optim.Optimizer] | None,
) -> torch.optim.Optimizer | FusedAdamW:
    if config.elementwise == "lion":
        return Lion(param_groups, (config.lion_beta1, config.lion_beta2))
    if config.elementwise == "sgd":
        return torch.optim.SGD(param_groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
    if is_registered("optimizer", config.elementwise):
        return _make_registered(config, param_groups)
    assert config.elementwise == "adam", config.elementwise
    options: dict[str, Any] = {
        "lr": 0.0,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
    }
    if fused_adam is not None:
        return fused_adam(param_groups, **options)
    return FusedAdamW(param_groups, **options)


def _make_registered(config: OptimizerConfig, param_groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Call the factory of a registered optimizer; every step sets the learning rate, which must only be valid here."""
    factory = find_registered("optimizer", config.elementwise).value
    made = factory(param_groups, lr=config.lr or 1e-3, **parse_optimizer_args(config.optimizer_args))
    if not isinstance(made, torch.optim.Optimizer):
        raise TypeError(f"the registered function returned {type(made).__name__}, not a torch.optim.Optimizer")
    return made


def measure_state_bytes(name: str, words: tuple[str, ...]) -> int:
    """Return the bytes of float32 state per parameter that a registered optimizer has after a step on a matrix."""
    parameter = torch.zeros(_MEASURED_SIDE, _MEASURED_SIDE)
    config = OptimizerConfig(optimizer=name, optimizer_args=words)
    try:
        inner = InnerOptimizer(config, [([parameter], 1.0)], shapes={id(parameter): parameter.shape})
        inner.set_learning_rate(0.0, 0.0)
        inner.make_state()
    except Exception as error:
        raise ConfigurationError(
            f"--optimizer {name}: the trial step that measures its state fails ({type(error).__name__}: {error}); fix "
            "it, or pass state_bytes to register_optimizer"
        ) from error
    tensors = [inner.state_of(parameter, name) for name in inner.names_of_state(parameter)]
    return round(sum(tensor.numel() * tensor.element_size() for tensor in tensors) / parameter.numel())


def _state_names(config: OptimizerConfig) -> tuple[str, ...]:
    if is_registered("optimizer", config.elementwise):
        return ()
    if config.elementwise == "adam":
        return ("exp_avg", "exp_avg_sq")
    if config.elementwise == "lion":
        return ("exp_avg",)
    assert config.elementwise == "sgd", config.elementwise
    return ("momentum_buffer",) if config.sgd_momentum else ()


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to everything except biases and one-dimensional parameters."""
    return parameter.dim() > 1 and not name.endswith("bias")


def is_decoupled(name: str) -> bool:
    """Return whether --decoupled-lr applies to a parameter: a word embedding or an output layer."""
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))


_ROWS, _COLUMNS, _CUT = 3, 4, 5
_NUM_STEPS = 3
_MEASURED_SIDE = 512
_GRADIENT_SCALES = (1.0, 1e3, 1e-3)
"""Small and large gradients: a rule with a threshold on a tensor's norm may be elementwise only on one side of it."""
_TOLERANCE = 1e-9
_SHAPES: tuple[tuple[tuple[int, ...], ...], ...] = (((12,),), ((_CUT,), (12 - _CUT,)), ((_ROWS, _COLUMNS),))


@dataclass(frozen=True)
class UpdateRule:
    """Properties of an update rule.

    ``is_elementwise``: an element's update depends on no other element, so that a shard is updated like the whole
    tensor. ``unsaved`` lists the state that a checkpoint would miss, with its location. Both are determined by trial
    steps, which cannot detect a dependence that occurs only beyond the tested gradient sizes.
    """

    name: str
    is_elementwise: bool = True
    unsaved: tuple[str, ...] = ()


@torch.no_grad()
def examine_rule(config: OptimizerConfig) -> UpdateRule:
    """Probe the configured update rule with three trial steps on twelve float64 numbers on CPU.

    The rule is elementwise if the results are the same for the numbers as one vector, as two vectors and as a matrix,
    with both small and large gradients.

    Raises:
        ConfigurationError: the rule fails in a trial step.
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
    """Trial of a rule on parameters of given shapes, which always hold the same twelve numbers."""

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
                f"{list(self._shapes[0])} ({type(error).__name__}: {error}); it must accept such tensors and its "
                "arguments, need no closure, and create its state in its first step"
            ) from error
        self.unsaved = tuple(self._find_unsaved(before, after_one))

    @property
    def state(self) -> dict[str, Any]:
        return next(iter(self._optimizer.state.values()), {})

    def agrees_with(self, other: _Trial) -> bool:
        """Return whether both trials end with the same parameters and state."""
        if not _is_close(_joined(self._parameters), _joined(other._parameters)):
            return False
        states = [list(trial._optimizer.state.values()) for trial in (self, other)]
        names = {frozenset(state) for of_trial in states for state in of_trial}
        return len(names) <= 1 and all(self._is_alike(states, name) for name in self.state)

    def _is_alike(self, states: Sequence[Sequence[dict[str, Any]]], name: str) -> bool:
        """Return whether a kind of state is elementwise, or one value for all elements."""
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


def _places(optimizer: torch.optim.Optimizer | FusedAdamW) -> Iterator[tuple[str, Any]]:
    """Yield the numbers that a rule keeps outside its parameters' state, except for the scheduled rates."""
    places = [(f"param_groups[{number}]", group) for number, group in enumerate(optimizer.param_groups)]
    for place, values in (*places, ("the optimizer", vars(optimizer))):
        for name, value in values.items():
            if is_saved(value) and name not in ("lr", "weight_decay", "grad_scale"):
                yield f"{name} of {place}", value.tolist() if isinstance(value, torch.Tensor) else value


def _joined(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _is_close(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.allclose(first.reshape(-1), second.reshape(-1), rtol=_TOLERANCE, atol=_TOLERANCE)
