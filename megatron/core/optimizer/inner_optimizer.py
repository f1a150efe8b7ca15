"""The update rule (torch's fused AdamW or SGD, Lion, or apex's Adam where it is on CUDA) and its parameter groups.

Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from megatron.core.optimizer.lion import Lion
from megatron.core.optimizer.optimizer_config import OptimizerConfig


class InnerOptimizer:
    """Update main parameters from their ``grad``.

    The state exists from the start, so that loading can fill it.

    ``state_names`` are the tensors of a parameter's shape that it keeps: Adam's moments, or a momentum. One step
    count serves all parameters. ``groups`` pairs main parameters with the multiplier of their weight decay.
    ``fused_adam`` is apex's class; it takes torch's place where every main parameter is a float32 CUDA tensor.
    """

    def __init__(
        self,
        config: OptimizerConfig,
        groups: Sequence[tuple[Sequence[torch.Tensor], float]],
        fused_adam: type[torch.optim.Optimizer] | None = None,
    ) -> None:
        param_groups = [{"params": list(parameters), "weight_decay": 0.0} for parameters, _ in groups]
        self._weight_decay_multipliers = [multiplier for _, multiplier in groups]
        parameters = [parameter for group, _ in groups for parameter in group]
        if not all(p.is_cuda and p.dtype is torch.float32 for p in parameters):
            fused_adam = None
        self._is_torch = fused_adam is None or config.elementwise != "adam"
        self._torch_optimizer = _make_torch_optimizer(config, param_groups, fused_adam)
        self.state_names = _state_names(config)
        # The fused kernels read the scale as a float32, which would round a float64 run's gradients.
        is_torch = self._is_torch and config.elementwise != "lion"
        self._scales_in_kernel = is_torch and all(p.dtype is torch.float32 for p in parameters)
        # On CPU the host reads for nothing, and then spares the kernel a division and a store.
        is_fused = self._scales_in_kernel and bool(self._torch_optimizer.defaults.get("fused"))
        can_decide = is_fused or isinstance(self._torch_optimizer, Lion)
        self.decides_on_device = can_decide and all(p.is_cuda for p in parameters)
        for parameter in parameters:
            state: dict[str, Any] = {name: torch.zeros_like(parameter) for name in self.state_names}
            if config.elementwise == "adam" and self._is_torch:
                state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            if state:
                self._torch_optimizer.state[parameter] = state

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
        optimizer.step()
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
        self._torch_optimizer.step()
        if self._scales_in_kernel:
            self._torch_optimizer.grad_scale = None  # type: ignore[attr-defined]

    def state_of(self, parameter: torch.Tensor, name: str) -> torch.Tensor:
        """Return one of the state tensors of a main parameter."""
        tensor: torch.Tensor = self._torch_optimizer.state[parameter][name]
        return tensor

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
            if "step" in state:
                state["step"].fill_(num_steps)
        if not self._is_torch:
            for group in self._torch_optimizer.param_groups:
                group["step"] = num_steps


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
