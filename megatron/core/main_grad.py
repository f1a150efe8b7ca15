"""Where a parameter's gradient is summed over micro-batches.

Layers write weight gradients straight into it, so that no second gradient tensor of the weight's size exists, and the
first contribution of a step overwrites what the last step left, so that nothing has to be zeroed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch


class MainGrad:
    """Hold the accumulated gradient of one parameter and tell its owner when a contribution has arrived.

    ``tensor`` has the parameter's shape and the accumulation dtype; usually it is a view into a flat buffer.
    ``num_uses`` is how many contributions one backward pass brings (two for a word embedding that is also the output
    layer); ``on_complete`` is called when all of them have arrived. ``on_begin`` is called before the first one after a
    reset: an owner that keeps no memory in between sets ``tensor`` there.
    """

    def __init__(
        self,
        tensor: torch.Tensor,
        num_uses: int = 1,
        on_complete: Callable[[], None] | None = None,
        on_begin: Callable[[], None] | None = None,
    ) -> None:
        self.tensor = tensor
        self.num_uses = num_uses
        self.on_complete = on_complete
        self.on_begin = on_begin
        self.is_empty = True
        self._num_arrived = 0

    def reset(self) -> None:
        """Forget what was accumulated; the next contribution overwrites it."""
        self.is_empty = True
        self._num_arrived = 0

    def fill_if_empty(self) -> None:
        """Set the gradient to zero where no contribution came since the last reset."""
        self._begin()
        if self.is_empty:
            self.tensor.zero_()
            self.is_empty = False

    def add(self, grad: torch.Tensor) -> None:
        """Add a gradient of the parameter's shape."""
        self._begin()
        if self.is_empty:
            self.tensor.copy_(grad)
        else:
            self.tensor.add_(grad)
        self._arrived()

    def add_matmul(self, left: torch.Tensor, right: torch.Tensor) -> None:
        """Add the matrix product ``left @ right``.

        Shapes: ``left: [out, n]``, ``right: [n, in]``.
        """
        if self.tensor.dtype != left.dtype:
            self.add(left @ right)
            return
        self._begin()
        if self.is_empty:
            torch.mm(left, right, out=self.tensor)
        else:
            self.tensor.addmm_(left, right)
        self._arrived()

    def add_rows(self, indices: torch.Tensor, rows: torch.Tensor) -> None:
        """Add ``rows[i]`` to row ``indices[i]``.

        Shapes: ``indices: [n]``, ``rows: [n, h]``.
        """
        self._begin()
        if self.is_empty:
            self.tensor.zero_()
        self.tensor.index_add_(0, indices, rows.to(self.tensor.dtype))
        self._arrived()

    def _begin(self) -> None:
        if self.is_empty and self.on_begin is not None:
            self.on_begin()

    def _arrived(self) -> None:
        self.is_empty = False
        self._num_arrived += 1
        if self._num_arrived == self.num_uses:
            self._num_arrived = 0
            if self.on_complete is not None:
                self.on_complete()


def attach_main_grad(parameter: torch.nn.Parameter, main_grad: MainGrad) -> None:
    """Direct a parameter's gradient contributions into ``main_grad``."""
    parameter.main_grad = main_grad  # type: ignore[attr-defined]


def main_grad_of(parameter: torch.Tensor) -> MainGrad | None:
    """Return where a parameter's gradient is accumulated, or None where autograd's own ``grad`` is used."""
    return cast("MainGrad | None", parameter.__dict__.get("main_grad"))


def set_gradient_uses(parameter: torch.nn.Parameter, num_uses: int) -> None:
    """Say how many gradient contributions one backward pass brings to a parameter."""
    parameter.num_gradient_uses = num_uses  # type: ignore[attr-defined]


def gradient_uses_of(parameter: torch.Tensor) -> int:
    """Return how many gradient contributions one backward pass brings to a parameter: one unless it was said."""
    return int(parameter.__dict__.get("num_gradient_uses", 1))
