"""Where the graph of a chunk begins: hidden states come in, and their gradient is caught."""

from __future__ import annotations

from typing import Any

import torch


class ChunkEntrance:
    """Catch the gradient of hidden states that come from the chunk before, without holding them."""

    def __init__(self) -> None:
        self.grad: torch.Tensor | None = None
        self._anchor = torch.empty(0, requires_grad=True)

    def enter(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the hidden states as the beginning of a graph."""
        result: torch.Tensor = _Enter.apply(self._anchor, hidden, self)  # type: ignore[no-untyped-call]
        return result


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, hidden: torch.Tensor, entrance: ChunkEntrance) -> torch.Tensor:
        ctx.entrance = entrance
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, None]:
        ctx.entrance.grad = grad
        return None, None, None
