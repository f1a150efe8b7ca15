"""AdamW by torch's fused kernel, without `torch.optim.Optimizer`.

Loshchilov and Hutter 2019, https://arxiv.org/abs/1711.05101. The first update of a ``torch.optim.Optimizer`` imports
``torch._dynamo``, which takes more than half a second of processor time. The update is the one of `torch.optim.AdamW`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.optim.adamw import adamw


class FusedAdamW:
    """Have the attributes of a torch optimizer that `InnerOptimizer` uses; the caller creates the state.

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
