"""The update rule (torch's fused AdamW or SGD, Lion, or apex's Adam where it is on CUDA) and its parameter groups.

Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from megatron.core.optimizer.lion import Lion
from megatron.core.optimizer.optimizer_config import OptimizerConfig

BUILT_IN = ("adam", "sgd", "lion")
"""Update rules that are elementwise and create all their state at the start."""
STEP = "step"
"""The count of updates in a rule's state; it is saved once, as that of the whole optimizer."""


class InnerOptimizer:
    """Update main parameters from their ``grad``.

    ``state_names`` are the tensors of a parameter's shape that exist from the start: Adam's moments, or a momentum. An
    update rule may create other state with its first update; `make_state` creates it before, so that loading can fill
    it. One step count serves all parameters. ``groups`` pairs main parameters with the multiplier of their weight
    decay. ``fused_adam`` is apex's class, used instead of torch's if every main parameter is a float32 CUDA tensor. The
    rule updates a parameter as a flat tensor, or in the shape that ``shapes`` has for its id.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        groups: Sequence[tuple[Sequence[torch.Tensor], float]],
        fused_adam: type[torch.optim.Optimizer] | None = None,
        shapes: Mapping[int, torch.Size] | None = None,
    ) -> None:
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
        # The fused kernels read the scale as a float32, which would round a float64 run's gradients.
        # A rule that does not declare `grad_scale` ignores it: its gradients are scaled before the update.
        is_fused = self._is_torch and bool(self._torch_optimizer.defaults.get("fused"))
        divides = is_fused or hasattr(type(self._torch_optimizer), "grad_scale")
        self._scales_in_kernel = divides and all(p.dtype is torch.float32 for p in parameters)
        # On CPU the host reads for nothing, and then spares the kernel a division and a store.
        is_fused = is_fused and self._scales_in_kernel
        can_decide = is_fused or isinstance(self._torch_optimizer, Lion)
        self.decides_on_device = can_decide and all(p.is_cuda for p in parameters)
        self._is_adam = self._is_torch and config.elementwise == "adam"
        self._has_own_state = self._is_torch and config.elementwise not in BUILT_IN
        self._is_made = False
        self._fill_state()
        self._first_state: dict[torch.Tensor, dict[str, Any]] = {}
        # Tensors that `state_of` has returned for numbers: `restore_numbers` reads the numbers back from them.
        self._lent: list[tuple[dict[str, Any], str, torch.Tensor]] = []

    @property
    def rule(self) -> torch.optim.Optimizer:
        """Return the update rule."""
        return self._torch_optimizer

    def set_learning_rate(self, learning_rate: float, weight_decay: float) -> None:
        """Set what the next step uses."""
        for group, multiplier in zip(self._torch_optimizer.param_groups, self._weight_decay_multipliers):
            group["lr"] = learning_rate
            group["weight_decay"] = weight_decay * multiplier

    def step_if(
        self, is_finite: torch.Tensor, parameters: Sequence[torch.Tensor], grad_multiplier: torch.Tensor
    ) -> None:
        """Make a ``step`` where ``is_finite`` is true, and change nothing where it is not.

        On CUDA torch's fused kernels and Lion find out by themselves (``decides_on_device``), so that the host need not
        wait for them.

        Shapes: ``is_finite: []`` of bool, ``grad_multiplier: []`` float64.
        """
        if not self.decides_on_device:
            if bool(is_finite):
                self.step(parameters, float(grad_multiplier))
            return
        if not parameters:
            return
        if isinstance(self._torch_optimizer, Lion):
            self._torch_optimizer.step_if(is_finite, grad_multiplier)
            return
        # torch's own GradScaler hands the fused optimizers the divisor and the verdict through these attributes.
        optimizer: Any = self._torch_optimizer
        optimizer.grad_scale = grad_multiplier.reciprocal().float()
        optimizer.found_inf = is_finite.logical_not().float()
        self._step_shaped(parameters)
        optimizer.grad_scale = optimizer.found_inf = None

    def step(self, parameters: Sequence[torch.Tensor], grad_multiplier: float) -> None:
        """Update every parameter with its gradient times ``grad_multiplier``, in the same pass where possible.

        Afterwards the gradients may or may not hold the product. A rank whose shards are padding has none.
        """
        if not parameters:
            return
        if grad_multiplier != 1.0 and not self._scales_in_kernel:
            torch._foreach_mul_([p.grad for p in parameters if p.grad is not None], grad_multiplier)
        elif grad_multiplier != 1.0:
            self._torch_optimizer.grad_scale = torch.tensor(  # type: ignore[attr-defined]
                1.0 / grad_multiplier, dtype=torch.float32, device=parameters[0].device
            )
        self._step_shaped(parameters)
        if self._scales_in_kernel:
            self._torch_optimizer.grad_scale = None  # type: ignore[attr-defined]

    def state_of(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return one of the state tensors of a main parameter, or a number as a tensor for `restore_numbers`."""
        state = self._torch_optimizer.state[self._updated[id(parameter)]]
        value = state[name]
        if isinstance(value, torch.Tensor):
            return value
        tensor = torch.tensor(value, dtype=torch.float64 if isinstance(value, float) else torch.int64)
        self._lent.append((state, name, tensor))
        return tensor

    def names_of_state(self, parameter: torch.Tensor) -> list[str]:
        """Return the names of the tensors and numbers that exist of a main parameter, without the count of updates."""
        updated = self._updated[id(parameter)]
        state = self._torch_optimizer.state.get(updated, {})
        return [name for name, value in state.items() if name != STEP and is_saved(value)]

    @torch.no_grad()
    def make_state(self) -> None:
        """Create the state that the rule creates with its first update, and leave every parameter as it is.

        The values are for loading to fill, or to be saved before the first update; `drop_made_state` removes them.
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
        """Return to the state before the first update."""
        if self._has_own_state and self._is_made:
            self._lent.clear()
            self._torch_optimizer.state.clear()
            self._fill_state()
            self._torch_optimizer.state.update(self._first_state)
            self._first_state = {}
            self._is_made = False

    def forget_lent_numbers(self) -> None:
        """Drop the tensors that `state_of` has returned for numbers: saving needs none of them afterwards."""
        self._lent.clear()

    def restore_numbers(self) -> None:
        """Copy loaded values back into the numeric state."""
        for state, name, tensor in self._lent:
            state[name] = tensor.item()
        self._lent.clear()

    def _fill_state(self) -> None:
        """Create the state that exists from the start."""
        for parameter in self._updated.values():
            state: dict[str, Any] = {name: torch.zeros_like(parameter) for name in self.state_names}
            if self._is_adam:
                state[STEP] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if state:
                self._torch_optimizer.state[parameter] = state

    def _step_shaped(self, parameters: Sequence[torch.Tensor]) -> None:
        """Make the rule's step, with gradients in the shapes in which it updates the parameters."""
        shaped = [(p, updated) for p in parameters if (updated := self._updated[id(p)]) is not p]
        for parameter, updated in shaped:
            updated.grad = None if parameter.grad is None else parameter.grad.view(updated.shape)
        self._torch_optimizer.step()
        self._is_made = True
        for _, updated in shaped:
            updated.grad = None

    @property
    def num_updates(self) -> torch.Tensor | int:
        """Return the count of Adam's updates, where it lies; 0 for what keeps none."""
        for state in self._torch_optimizer.state.values():
            if "step" in state:
                count: torch.Tensor = state["step"]
                return count
        return max((group.get("step", 0) for group in self._torch_optimizer.param_groups), default=0)

    def set_num_steps(self, num_steps: int) -> None:
        """Set the count of updates made, from which Adam corrects the bias of its moments."""
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
    """Return whether a checkpoint can hold a value of a rule's state: a tensor or a number."""
    return isinstance(value, torch.Tensor) or (isinstance(value, (int, float)) and not isinstance(value, bool))


def _make_torch_optimizer(
    config: OptimizerConfig,
    param_groups: list[dict[str, Any]],
    fused_adam: type[torch.optim.Optimizer] | None,
) -> torch.optim.Optimizer:
    if config.elementwise == "lion":
        return Lion(param_groups, (config.lion_beta1, config.lion_beta2))
    if config.elementwise == "sgd":
        return torch.optim.SGD(param_groups, lr=0.0, momentum=config.sgd_momentum, fused=True)
    assert config.elementwise == "adam", config.elementwise
    options: dict[str, Any] = {
        "lr": 0.0,
        "betas": (config.adam_beta1, config.adam_beta2),
        "eps": config.adam_eps,
    }
    if fused_adam is not None:
        return fused_adam(param_groups, **options)
    return torch.optim.AdamW(param_groups, fused=True, **options)


def _state_names(config: OptimizerConfig) -> tuple[str, ...]:
    if config.elementwise == "adam":
        return ("exp_avg", "exp_avg_sq")
    if config.elementwise == "lion":
        return ("exp_avg",)
    assert config.elementwise == "sgd", config.elementwise
    return ("momentum_buffer",) if config.sgd_momentum else ()


def is_decayed(name: str, parameter: torch.Tensor) -> bool:
    """Return whether weight decay applies: to everything but biases and one-dimensional parameters."""
    return parameter.dim() > 1 and not name.endswith("bias")


def is_decoupled(name: str) -> bool:
    """Return whether --decoupled-lr is the learning rate of a parameter: a word embedding or an output layer."""
    return name.endswith(("word_embeddings.weight", "output_layer.weight"))
