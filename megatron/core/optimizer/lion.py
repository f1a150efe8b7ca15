"""Lion: the sign of a momentum, the same step for every parameter. Chen et al. 2023, https://arxiv.org/abs/2302.06675."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_PIECE = 1 << 24
"""Elements that are updated together: what stands beside them takes memory."""


class Lion(torch.optim.Optimizer):
    """Subtract learning rate × (sign of ``beta1`` · momentum + (1 - ``beta1``) · gradient, and decay · weight).

    The momentum, ``exp_avg`` in the state, then decays by ``beta2`` towards the gradient.
    """

    def __init__(self, param_groups: list[dict[str, Any]], betas: tuple[float, float], lr: float = 0.0) -> None:
        super().__init__(param_groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update every parameter that has a gradient; there is no closure."""
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
        """Make a ``step`` from the gradients times a factor where ``is_finite`` is true, and change nothing elsewhere.

        The device decides: the host reads neither number. The gradients stay as they are.

        Shapes: ``is_finite: []`` of bool, ``grad_multiplier: []`` float64.
        """
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            kept = 1.0 - group["lr"] * group["weight_decay"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                momentum = self.state[parameter]["exp_avg"]
                flat = (tensor.view(-1).split(_PIECE) for tensor in (parameter, parameter.grad, momentum))
                for weights, gradients, momenta in zip(*flat, strict=True):
                    scaled = gradients * grad_multiplier.to(gradients.dtype)
                    update = momenta.lerp(scaled, 1.0 - beta1).sign_()
                    moved = (weights * kept).add_(update, alpha=-group["lr"])
                    weights.copy_(torch.where(is_finite, moved, weights))
                    momenta.copy_(torch.where(is_finite, momenta.lerp(scaled, 1.0 - beta2), momenta))
