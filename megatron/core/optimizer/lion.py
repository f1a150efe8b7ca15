"""Lion: the sign of a momentum, the same step for every parameter. Chen et al. 2023, https://arxiv.org/abs/2302.06675."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
        factors: dict[torch.dtype, torch.Tensor] = {}
        for group in self.param_groups:
            for weights, gradients, momenta in self._chunks(group["params"]):
                dtype = weights[0].dtype
                if dtype not in factors:
                    factors[dtype] = grad_multiplier.to(dtype)
                _update_if(is_finite, group, weights, list(torch._foreach_mul(gradients, factors[dtype])), momenta)

    def _chunks(self, parameters: Sequence[torch.Tensor]) -> Iterator[list[list[torch.Tensor]]]:
        """Yield what is updated together, of one dtype: weights, gradients and momenta, large ones in flat pieces."""
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
    """Make a step of some weights where ``is_finite`` is true; what stands beside them ends with the call."""
    beta1, beta2 = group["betas"]
    updates = torch._foreach_lerp(momenta, gradients, 1.0 - beta1)
    torch._foreach_sign_(updates)
    moved = torch._foreach_mul(weights, 1.0 - group["lr"] * group["weight_decay"])
    torch._foreach_add_(moved, updates, alpha=-group["lr"])
    del updates
    later = torch._foreach_lerp(momenta, gradients, 1.0 - beta2)
    for new, old in zip((*moved, *later), (*weights, *momenta), strict=True):
        torch.where(is_finite, new, old, out=old)
