"""Gradients of biases: sums over the rows of a gradient, begun by the program that wrote those rows where one did."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron.core.main_grad import MainGrad, main_grad_of


class Receiver(NamedTuple):
    """Say where a parameter's gradient goes: into its main gradient, or to autograd in the parameter's dtype."""

    dtype: torch.dtype
    main_grad: MainGrad | None

    @classmethod
    def of(cls, parameter: torch.Tensor) -> Receiver:
        """Return a parameter's receiver; to be asked in the forward pass, as recompute copies parameters.

        Where several layers use a parameter autograd adds their gradients, of which some may be deferred.
        """
        main_grad = main_grad_of(parameter)
        return cls(parameter.dtype, main_grad if main_grad is not None and main_grad.num_uses == 1 else None)


def leave_parts(grad: torch.Tensor, parts: torch.Tensor) -> None:
    """Leave with a gradient what parts of its rows sum to, for whom it reaches unchanged.

    Shapes: ``grad: [..., width]``, ``parts: [1, n, width]`` in float32.
    """
    grad.column_parts = parts, grad._version  # type: ignore[attr-defined]


def bias_gradient(grad: torch.Tensor, receiver: Receiver) -> torch.Tensor | None:
    """Return the sum over a gradient's rows, or None where the receiver's main gradient has it already.

    Parts that were left with the gradient are summed. A gradient that another one was added to has none, or another
    version than when they were left: then its rows are read.

    Shapes: ``[..., width] -> [width]``.
    """
    parts, version = grad.__dict__.get("column_parts", (None, None))
    if parts is None or version != grad._version:
        return grad.reshape(-1, grad.shape[-1]).sum(dim=0)
    from megatron.core.kernels.triton_programs.column_sums import sum_parts

    return sum_parts(parts, [receiver])[0]
